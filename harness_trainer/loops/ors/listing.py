"""Which environment of a server is meant, and its tasks: what is asked before any session is made, through the SDK.

Owns the choice of an environment by name, and the pages in which tasks are fetched: only those that are wanted. Every
failure here is a set-up error that says what to do. Called by `environment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
from openreward.api._session.http import AuthenticationError, set_retry_policy
from openreward.api.environments.client import AsyncEnvironment
from openreward.api.errors import OpenRewardError

from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.loops.ors.session import Place, key_refused
from harness_trainer.loops.ors.wire import Broken, Refused, Wire

_PAGE = 200  # tasks asked for at once


class Listing:
    """One environment's splits and tasks."""

    def __init__(self, http: aiohttp.ClientSession, place: Place) -> None:
        set_retry_policy(http, "env-server")
        name = place.deployment.rpartition("/")[2]
        self._place = place
        self._environment = AsyncEnvironment(place.owner, name, place.variant, http, place.credentials.api_key)

    async def check_split(self, split: str) -> None:
        with self._asking("splits"):
            splits = await self._environment.list_splits()
        if split not in splits:
            raise EnvironmentFault(
                f"the environment at {self._place.url} has no split {split!r}: choose one of {', '.join(splits)} with"
                " --env.split"
            )

    async def tasks(self, split: str, *, num_tasks: int | None, indices: Sequence[int] | None) -> dict[int, Any]:
        """The wanted tasks of the split by their index."""
        with self._asking("tasks"):
            there = int(await self._environment.num_tasks(split))
            if indices is None:
                indices = range(there if num_tasks is None else min(num_tasks, there))
            if not indices:
                raise EnvironmentFault(f"the split {split!r} at {self._place.url} has no tasks: choose another split")
            if (last := max(indices)) >= there:
                raise EnvironmentFault(
                    f"there is no task {last} in the split {split!r} at {self._place.url}, which has {there}, from 0 on"
                )
            found: dict[int, Any] = {}
            for start, stop in _runs(sorted(indices)):
                found |= await self._range(split, start, stop)
            return {index: found[index] for index in indices}

    async def shared_tools(self) -> list[dict[str, Any]]:
        """Those that every task has, as the server lists them."""
        with self._asking("tools"):
            listed = await self._environment.list_tools()
        return [
            {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema} for tool in listed
        ]

    async def _range(self, split: str, start: int, stop: int) -> dict[int, Any]:
        try:
            tasks = await self._environment.get_task_range(split, start, stop)
        except aiohttp.ClientResponseError as error:
            if error.status not in (404, 405):
                raise
            tasks = [await self._environment.get_task(split, index) for index in range(start, stop)]
        if len(tasks) != stop - start:
            raise EnvironmentFault(
                f"the environment at {self._place.url} gave {len(tasks)} tasks for {start} to {stop - 1} of {split!r}:"
                " its get_task_range and num_tasks disagree"
            )
        return {start + n: task.task_spec for n, task in enumerate(tasks)}

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        url, mask = self._place.url, self._place.credentials.mask
        try:
            yield
        except AuthenticationError as error:
            raise key_refused(url, Refused(401, "Unauthorized")) from error
        except aiohttp.ClientResponseError as error:
            refused = Refused(error.status, " ".join(mask(str(error.message)).split())[:300])
            if error.status in (401, 403):
                raise key_refused(url, refused) from error
            raise EnvironmentFault(f"{url} does not say what {what} it has: {refused}") from error
        except (aiohttp.ClientError, OSError, TimeoutError, OpenRewardError) as error:
            reason = mask(" ".join(str(error).split())[:300]) or type(error).__name__
            raise EnvironmentFault(
                f"no ORS server answers at {url} ({reason}): start it, or correct --tasks"
            ) from error
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            what = f"what {url} says of its {what} makes no sense"
            raise EnvironmentFault(f"{what} ({type(error).__name__}: {error}): is it an ORS server?") from error


async def find_variant(wire: Wire, url: str, env_name: str | None) -> str | None:
    """What the server's routes call the environment that `env_name` means; None = it does not say what it has.

    A server of a single environment takes any name for it, as the SDK does; one of several only those it has.
    """
    try:
        listed = await wire.ask("GET", "/list_environments")
    except Refused as refused:
        if refused.status in (401, 403):
            raise key_refused(url, refused) from refused
        return env_name
    except Broken as broken:
        raise EnvironmentFault(f"no ORS server answers at {url} ({broken}): start it, or correct --tasks") from broken
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    if env_name is None or not names:
        return names[0] if names else env_name
    if env_name.lower() in names:
        return env_name.lower()
    if len(names) > 1:
        raise EnvironmentFault(
            f"the server at {url} has no environment {env_name!r}: choose one of {', '.join(names)} with --env.env-name"
        )
    return names[0]


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sorted indices as (start, stop) of what lies together, no longer than a page."""
    start = 0
    for n in range(1, len(indices) + 1):
        if n == len(indices) or indices[n] != indices[n - 1] + 1 or n - start == _PAGE:
            yield indices[start], indices[n - 1] + 1
            start = n
