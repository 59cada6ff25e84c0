"""Removing what dead owners left in a Docker engine: containers, networks, volumes, images and layers of cut builds.

Owns finding by label and forced removal, in that order, tolerant of other reapers at the same work. Who is dead is
`docker_labels`' and `ownership`'s judgement. Called by `lifecycle.reap` (things of records), by the Docker backend when
it opens (things whose record is lost) and by the command line. Blocking; imported only when there is an engine to ask.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import docker
from docker.errors import APIError

from sandboxes.docker_api import ENGINE_ERRORS, connect, is_absent, reason
from sandboxes.docker_labels import BUILD, CLAIM, CONTENT, KIND, LAYER, dead_owner, read_mark
from sandboxes.ownership import Claim, Owner, has_record
from sandboxes.processes import LifecycleError

CUT_BUILDS = "cut builds"  # stands for a claim where the builds themselves are forgotten
_IN_FLIGHT_S = 60.0  # so long after its claim the engine may still be making what a killed owner asked for
_SECOND_LOOK_S = 0.5
_GIVE_UP_S = 10.0  # for one thing that the engine does not let go


@dataclass(frozen=True, slots=True)
class Thing:
    """An object in the engine. Example: Thing("container", "4f2a..", "box-412", {"harness-trainer.claim": ..})."""

    type: str  # "container", "network", "volume" or "image"
    id: str
    name: str
    labels: dict[str, str]

    def __str__(self) -> str:
        return f"{self.type} {self.name or self.id.removeprefix('sha256:')[:12]}"


@dataclass(slots=True)
class Ended:
    """What was removed of one claim, or would be. `problem` "" = nothing of it is left."""

    things: list[Thing] = field(default_factory=list)
    problem: str = ""


class Engine:
    """A Docker engine to clean. Raises LifecycleError when it does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._api = connect(address, timeout_s=30.0)
        except ENGINE_ERRORS as e:
            raise LifecycleError(f"the Docker engine at {address} does not answer ({reason(e)}); start it again") from e

    def close(self) -> None:
        self._api.close()

    # --- finding ---

    def find(self, label: str = CLAIM) -> list[Thing]:
        """Every object with the label ("name" or "name=value"), in the order they must be removed in."""
        filters = {"label": [label]}
        api = self._api
        containers = api.containers(all=True, filters=filters)
        networks = api.networks(filters=filters)
        volumes = api.volumes(filters=filters)["Volumes"] or []
        images = api.images(filters=filters)
        return [
            *(
                Thing("container", c["Id"], c["Names"][0].lstrip("/") if c["Names"] else "", c["Labels"] or {})
                for c in containers
            ),
            *(Thing("network", n["Id"], n["Name"], n["Labels"] or {}) for n in networks),
            *(Thing("volume", v["Name"], v["Name"], v["Labels"] or {}) for v in volumes),
            *(Thing("image", i["Id"], (_tags(i) or [""])[0], i["Labels"] or {}) for i in images),
        ]

    def find_claim(self, claim_id: str) -> list[Thing]:
        """Raises LifecycleError."""
        return self._asked(functools.partial(self.find, f"{CLAIM}={claim_id}"))

    def orphans(self, here: Owner) -> dict[str, list[Thing]]:
        """Objects of dead owners whose record is lost, by claim."""
        found: dict[str, list[Thing]] = {}
        for thing in self._asked(self.find):
            mark = read_mark(thing.labels)
            if mark is None or has_record(mark.registry, mark.claim_id):
                continue  # a record's own registry decides
            if dead_owner(thing.labels, here):
                found.setdefault(mark.claim_id, []).append(thing)
        return found

    # --- removing ---

    def end(self, claims: Sequence[Claim]) -> dict[str, Ended]:
        """Remove everything of these claims, whose owners are dead. Never raises for a single thing: see `problem`."""
        ended = {claim.id: Ended() for claim in claims}
        self._end_claims(ended)
        if any(time.time() - claim.created_at < _IN_FLIGHT_S for claim in claims):
            time.sleep(_SECOND_LOOK_S)
            self._end_claims(ended)
        for claim in claims:
            if claim.unlabelled:
                call = functools.partial(remove_build, self._api, claim.unlabelled)
                ended[claim.id].things += self._guarded(ended[claim.id], call)
        return ended

    def sweep(self, here: Owner) -> dict[str, Ended]:
        """Remove what dead owners without a record left, and layers of builds that nobody is making."""
        orphans = self.orphans(here)
        ended = {claim_id: Ended() for claim_id in orphans}
        self._remove_all([t for things in orphans.values() for t in things], ended)
        stray = Ended()
        stray.things += self._guarded(stray, functools.partial(remove_stray, self._api))
        if stray.things or stray.problem:
            ended[CUT_BUILDS] = stray
        return ended

    def left_overs(self, here: Owner) -> dict[str, list[Thing]]:
        """What `sweep` would remove. Raises LifecycleError."""
        found = self.orphans(here)
        if stray := self._asked(functools.partial(find_stray, self._api)):
            found[CUT_BUILDS] = stray
        return found

    def _end_claims(self, ended: dict[str, Ended]) -> None:
        """One listing for all: there may be hundreds."""
        things = [t for t in self._asked(self.find) if t.labels.get(CLAIM) in ended]
        self._remove_all(things, ended)

    def _remove_all(self, things: Sequence[Thing], ended: dict[str, Ended]) -> None:
        """Containers first and at the same time: each takes a fifth of a second, and holds the rest."""
        containers = [t for t in things if t.type == "container"]
        rest = [t for t in things if t.type != "container"]
        remove = functools.partial(remove_thing, self._api)
        with ThreadPoolExecutor(8, "reap") as pool:
            problems = [*pool.map(remove, containers), *map(remove, rest)]
        for thing, problem in zip([*containers, *rest], problems, strict=True):
            of = ended[thing.labels[CLAIM]]
            if problem:
                of.problem = of.problem or problem
            else:
                of.things.append(thing)

    # --- asking ---

    def _asked(self, call: Callable[[], list[Thing]]) -> list[Thing]:
        try:
            return call()
        except ENGINE_ERRORS as e:
            raise LifecycleError(f"the Docker engine at {self.address} does not answer ({reason(e)})") from e

    def _guarded(self, of: Ended, call: Callable[[], list[Thing]]) -> list[Thing]:
        try:
            return call()
        except ENGINE_ERRORS as e:
            of.problem = of.problem or f"layers could not be removed: {reason(e)}"
            return []


def sweep(address: str, *, dry_run: bool = False) -> dict[str, Ended]:
    """`Engine.sweep` of the engine at `address`; `dry_run` only tells. Raises LifecycleError."""
    engine, here = Engine(address), Owner.current()
    try:
        if dry_run:
            return {claim_id: Ended(things) for claim_id, things in engine.left_overs(here).items()}
        return engine.sweep(here)
    finally:
        engine.close()


def remove_thing(api: docker.APIClient, thing: Thing) -> str:
    """Force it away and wait until it is gone; why that failed, or "". Safe beside others who do the same."""
    end = time.monotonic() + _GIVE_UP_S
    while True:
        try:
            _ask_to_remove(api, thing)
            return ""
        except ENGINE_ERRORS as e:
            if is_absent(e):
                return ""
            # Another reaper is at it, or what uses it is just ending.
            busy = isinstance(e, APIError) and e.status_code in (403, 409, 500)
            if not busy or time.monotonic() > end:
                return f"{thing} could not be removed: {reason(e)}"
        time.sleep(0.1)


def _ask_to_remove(api: docker.APIClient, thing: Thing) -> None:
    if thing.type == "container":
        api.remove_container(thing.id, v=True, force=True)
    elif thing.type == "network":
        for container in api.inspect_network(thing.id).get("Containers") or {}:
            with contextlib.suppress(APIError):
                api.disconnect_container_from_network(container, thing.id, force=True)
        api.remove_network(thing.id)
    elif thing.type == "volume":
        api.remove_volume(thing.id, force=True)
    else:
        api.remove_image(thing.id, force=True)


def remove_build(api: docker.APIClient, ids: Sequence[str]) -> list[Thing]:
    """Remove what a build left; `ids` are "container:ID" and "image:ID" as its stream named them, perhaps short."""
    for name in ids:
        kind, _, container = name.partition(":")
        if kind == "container":  # the engine removes it when its client is gone, but in its own time
            remove_thing(api, Thing("container", container, "", {}))
    layers = tuple("sha256:" + i.removeprefix("image:") for i in ids if i.startswith("image:"))
    return remove_layers(api, lambda image: image["Id"].startswith(layers)) if layers else []


def find_stray(api: docker.APIClient) -> list[Thing]:
    """Containers and last layers that unfinished builds of ours left; none while one is being made: it may use them."""
    if api.volumes(filters={"label": [f"{KIND}={BUILD}"]})["Volumes"]:
        return []
    containers = [c for c in api.containers(all=True, filters={"label": [LAYER]}) if _unfinished(c["Labels"])]
    layers = [i for i in api.images(filters={"dangling": True, "label": [LAYER]}) if _unfinished(i["Labels"])]
    return [
        *(Thing("container", c["Id"], "", c["Labels"]) for c in containers),
        *(Thing("image", i["Id"], "", i["Labels"]) for i in layers),
    ]


def remove_stray(api: docker.APIClient) -> list[Thing]:
    """Remove what `find_stray` finds, and the layers below."""
    found = find_stray(api)
    containers = [thing for thing in found if thing.type == "container"]
    for thing in containers:
        remove_thing(api, thing)
    return containers + (remove_layers(api, lambda image: _unfinished(image["Labels"])) if found else [])


def _unfinished(labels: dict[str, str] | None) -> bool:
    """Whether a layer or container is of a build that did not end.

    What people (or a sandbox) made of a finished image inherits its labels, and those say so.
    """
    return LAYER in (labels or {}) and CONTENT not in (labels or {}) and CLAIM not in (labels or {})


def remove_layers(api: docker.APIClient, ours: Callable[[dict[str, Any]], bool]) -> list[Thing]:
    """Remove the untagged images without children that are `ours`, and then their parents that have become so.

    What is in use stays. (`noprune`: by itself the engine would take all untagged parents along, also a stranger's.)
    """
    removed: list[Thing] = []
    refused: set[str] = set()
    while True:
        leaves = [i for i in api.images(filters={"dangling": True}) if ours(i) and i["Id"] not in refused]
        if not leaves:
            return removed
        for leaf in leaves:
            try:
                api.remove_image(leaf["Id"], noprune=True)
                removed.append(Thing("image", leaf["Id"], "", leaf["Labels"] or {}))
            except APIError as e:
                if not is_absent(e):
                    refused.add(leaf["Id"])


def _tags(image: dict[str, Any]) -> list[str]:
    return [tag for tag in image.get("RepoTags") or [] if tag != "<none>:<none>"]
