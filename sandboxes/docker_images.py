"""The images that a run's sandboxes are made from: found, pulled, or built from a task's folder, each once.

Owns when an image is built: never twice for equal folders (the tag is the content's hash), once for many siblings that
ask at the same time, once over processes (a lock file per hash), and not again for a while after it failed. Building
itself is `docker_build`'s. Also owns the cache folder's logs and times of last use, which `remove_unused` goes by.
Called by the Docker backend and the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from sandboxes.base import BoxSpec, SandboxError, SetupFailed
from sandboxes.docker_api import ENGINE_ERRORS, connect, reason
from sandboxes.docker_build import CutOff, Job, build, find_image, pull
from sandboxes.docker_context import Context
from sandboxes.docker_labels import CONTENT, PROJECT
from sandboxes.ownership import LifecycleError

REPOSITORY = f"{PROJECT}/task"
RETRY_AFTER_S = 300.0  # a failed build or pull is not tried again before
_LOCK_LOOK_S = 0.2
_END_S = 30.0  # for the engine to let go of a build that was cut off

T = TypeVar("T")


def default_cache() -> Path:
    """Where logs, locks and times of last use are kept: `images` in the project's cache folder."""
    own = os.environ.get("HARNESS_TRAINER_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness-trainer"
    return (Path(own) if own else base) / "images"


class Images:
    """The images of one run in one engine. Close it: a build that still runs is ended.

    `logs` is the folder for the logs of builds and pulls (None = in the cache), `max_building` how many run at once.
    """

    def __init__(
        self,
        address: str,
        *,
        registry: Path,
        run_id: str,
        cache: Path | None = None,
        logs: Path | None = None,
        max_building: int = 2,
    ) -> None:
        self._address = address
        self._registry = registry
        self._run_id = run_id
        self._cache = cache or default_cache()
        self._logs = logs or self._cache / "logs"
        self._threads = ThreadPoolExecutor(max_building + 2, "image")
        self._building = asyncio.Semaphore(max_building)
        self._tasks: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._failed: dict[tuple[str, str], tuple[float, SetupFailed]] = {}  # monotonic seconds

    async def ensure(self, spec: BoxSpec, default: str) -> str:
        """The id ("sha256:..") of the image for `spec`, made if need be; `default` is for a spec that names none.

        Raises SetupFailed when it cannot be had, with the path of its log, and SandboxError when the engine fails.
        """
        if spec.image is None and spec.build_dir is not None:
            key = ("build", str(spec.build_dir.resolve()))
            make = partial(self._built, spec.build_dir, spec.name, spec.build_timeout_s)
        else:
            key = ("image", spec.image or default)
            make = partial(self._present, key[1], spec.build_timeout_s)
        return await self._once(key, make)

    def forget(self, image_id: str) -> None:
        """The image is not in the engine any more: look again, and make it again, when it is next asked for."""
        for key, task in list(self._tasks.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() == image_id:
                del self._tasks[key]

    async def close(self) -> None:
        running = [task for task in self._tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False)

    # --- once ---

    async def _once(self, key: tuple[str, str], make: Callable[[], Coroutine[None, None, str]]) -> str:
        """Everybody who asks waits for the same task, which goes on when one of them is cancelled."""
        when, failed = self._failed.get(key, (0.0, None))
        if failed is not None and time.monotonic() - when < RETRY_AFTER_S:
            raise SetupFailed(str(failed), failed.log_path)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._remembered(key, make), name=f"image {key[1]}")
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # all who waited may be gone
        try:
            return await asyncio.shield(task)
        except SetupFailed as e:
            raise SetupFailed(str(e), e.log_path) from e  # each has a traceback of its own
        except asyncio.CancelledError:
            if task.cancelled():
                raise SandboxError("the sandbox's image was not made: the run is ending") from None
            raise

    async def _remembered(self, key: tuple[str, str], make: Callable[[], Coroutine[None, None, str]]) -> str:
        try:
            return await make()
        except SetupFailed as e:
            self._failed[key] = (time.monotonic(), e)
            del self._tasks[key]
            raise
        except (LifecycleError, *ENGINE_ERRORS) as e:
            del self._tasks[key]
            raise SandboxError(f"the Docker engine at {self._address} failed at an image: {reason(e)}") from e
        except BaseException:
            del self._tasks[key]
            raise

    # --- images by name ---

    async def _present(self, name: str, limit_s: float) -> str:
        found = await self._call(partial(self._find, name))
        if found is not None:
            return found
        log_path = self._logs / f"pull-{re.sub('[^A-Za-z0-9._-]+', '-', name)}.log"
        async with self._building:
            cut = CutOff()
            work = partial(pull, self._address, name, log_path=log_path, limit_s=limit_s, cut=cut)
            try:
                return await self._limited(work, cut, limit_s, f"pulling image {name}", log_path)
            except (SetupFailed, *ENGINE_ERRORS) as e:
                if isinstance(e, SetupFailed) and cut.done:
                    raise
                raise SetupFailed(
                    f"image {name} is not in the engine and cannot be pulled ({reason(e)}); load it, or name another",
                    log_path,
                ) from e

    def _find(self, name: str) -> str | None:
        with contextlib.closing(connect(self._address, timeout_s=60.0)) as api:
            return find_image(api, name)

    # --- images from folders ---

    async def _built(self, folder: Path, task: str, limit_s: float) -> str:
        context = await self._call(partial(Context.read, folder))
        tag = f"{REPOSITORY}:{context.digest[:32]}"
        found = await self._call(partial(self._find, tag))
        if found is None:
            async with self._building, self._lock(context.digest):
                found = await self._call(partial(self._find, tag))  # another process may have built it meanwhile
                if found is None:
                    found = await self._build(context, tag, task, limit_s)
        await self._call(partial(touch_used, self._cache, context.digest))
        return found

    async def _build(self, context: Context, tag: str, task: str, limit_s: float) -> str:
        name = re.sub("[^A-Za-z0-9._-]+", "-", task)[:80] or "image"
        log_path = self._logs / f"{name}-{context.digest[:12]}.log"
        cut = CutOff()
        job = Job(context, tag, task, log_path, limit_s, cut)
        work = partial(build, self._address, job, registry=self._registry, run_id=self._run_id)
        try:
            return await self._limited(work, cut, limit_s, f"building the image of {task}", log_path)
        except SetupFailed as e:
            if cut.done:
                raise
            why = _explained(e, context)
            raise SetupFailed(f"the image of {task} does not build: {why}; see {log_path}", log_path) from e

    @contextlib.asynccontextmanager
    async def _lock(self, digest: str) -> AsyncIterator[None]:
        """Held by one process for one content. Waits as long as that takes: the holder's build has a limit."""
        path = self._cache / "locks" / f"{_engine_key(self._address)}-{digest[:32]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_LOOK_S)
            yield

    # --- threads ---

    async def _limited(self, work: Callable[[], str], cut: CutOff, limit_s: float, what: str, log_path: Path) -> str:
        """The work's result; at the time limit or when cancelled it is cut off and waited for."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(future)
        except (TimeoutError, asyncio.CancelledError) as e:
            if future.done() and not isinstance(e, asyncio.CancelledError):
                return future.result()
            cut.cut()
            await asyncio.wait([future], timeout=_END_S)
            if future.done() and not future.cancelled():
                future.exception()  # what cutting looks like; it is told below
            if isinstance(e, asyncio.CancelledError):
                raise
            raise SetupFailed(f"{what} took longer than {limit_s:g} s and was ended; see {log_path}", log_path) from e

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _explained(error: SetupFailed, context: Context) -> str:
    text = str(error)
    used = context.needs_buildkit()
    if used and (
        "buildkit" in text.lower() or "unknown" in text.lower() or "parse error" in text.lower() or "<<" in used
    ):
        return (
            f"{text}. Its Dockerfile uses {used}, which only BuildKit understands and Docker's SDK cannot ask for: "
            "build it yourself (`docker build -t NAME DIR`) and name the image in the task"
        )
    return text


# --- last use ----------------------------------------------------------------------------------------------------


def _engine_key(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:8]


def touch_used(cache: Path, digest: str) -> None:
    """Note that the image with this content is used now."""
    path = cache / "used" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def remove_unused(address: str, *, days: float, cache: Path | None = None, dry_run: bool = False) -> list[str]:
    """Remove built images that no run used for `days` and no container uses; their names. Raises LifecycleError."""
    try:
        return _remove_unused(address, days, (cache or default_cache()) / "used", dry_run)
    except ENGINE_ERRORS as e:
        raise LifecycleError(f"the Docker engine at {address} failed at removing images: {reason(e)}") from e


def _remove_unused(address: str, days: float, used: Path, dry_run: bool) -> list[str]:
    removed: list[str] = []
    with contextlib.closing(connect(address)) as api:
        in_use = {c["ImageID"] for c in api.containers(all=True)}
        for image in api.images(filters={"label": [CONTENT]}):
            tags = [tag for tag in image["RepoTags"] or [] if tag.startswith(f"{PROJECT}/")]
            note = used / image["Labels"][CONTENT]
            last = note.stat().st_mtime if note.exists() else float(image["Created"])
            if not tags or image["Id"] in in_use or time.time() - last < days * 86400:
                continue
            if not dry_run:
                for tag in tags:
                    api.remove_image(tag)
                note.unlink(missing_ok=True)
            removed.append(tags[0])
    return removed
