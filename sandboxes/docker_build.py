"""One image build or pull in a Docker engine: streamed into a log, ended when its time is up, cleaned up after.

Owns the stream of the engine's builder, cutting it off from another thread, and removing what an unfinished build
leaves. When to build is `docker_images`' business, its only caller. Blocking.

The SDK speaks to the engine's classic builder. BuildKit is not available through it; a Dockerfile that needs BuildKit
is refused with a message that says so. A build's commands run in the engine's default network, as with `docker build`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import APIError
from docker.utils import parse_repository_tag
from requests import Response

from sandboxes.base import SetupFailed
from sandboxes.docker_api import ENGINE_ERRORS, connect, is_absent, reason
from sandboxes.docker_context import Context
from sandboxes.docker_labels import BUILD, engine_of, image_labels, labels_of
from sandboxes.docker_reaping import remove_build, remove_stray
from sandboxes.ownership import Claim, claim

_LOG_CAP = 20_000_000  # bytes of one build's log
_RUNNING_IN = re.compile(r"---> Running in ([0-9a-f]{12,64})")
_LAYER_ID = re.compile(r"---> ([0-9a-f]{12,64})\s*$")
_LOST_LAYER = re.compile(r"no such image: sha256:", re.IGNORECASE)


class CutOff:
    """Ends a streaming call from another thread: the engine stops a build or pull whose client has gone."""

    def __init__(self) -> None:
        self.done = False
        self._response: Response | None = None

    def watch(self, api: docker.APIClient) -> None:
        """Follow the calls of a client that is used for this one thing."""
        api.hooks["response"].append(self._remember)

    def _remember(self, response: Response, *_: object, **__: object) -> None:
        self._response = response
        if self.done:
            self.cut()

    def cut(self) -> None:
        self.done = True
        if self._response is not None:
            # The reader may have finished this moment: then there is nothing to shut.
            with contextlib.suppress(ValueError, RuntimeError, OSError):
                self._response.raw.shutdown()

    def guard(self, file: IO[bytes]) -> Iterator[bytes]:
        """The file's bytes as long as nothing was cut: ends an upload."""
        while not self.done and (chunk := file.read(1 << 20)):
            yield chunk
        if self.done:
            raise SetupFailed("the build was cut off")


class BuildLog:
    """The log file of a build, written as it goes; remembers the last line and what the builder made."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.last = ""
        self._note = note  # called with "container:ID" or "image:ID"
        self._cached = False
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        self._file.close()

    def message(self, message: dict[str, Any]) -> None:
        """One message of the engine's stream. Raises SetupFailed for its error."""
        if error := message.get("error"):
            self._write(f"{error}\n")
            raise SetupFailed(" ".join(str(error).split())[:500], self.path)
        if "stream" in message:
            self._stream(str(message["stream"]))
        elif "status" in message and "progress" not in message:
            self._write(" ".join(str(message[k]) for k in ("id", "status") if k in message) + "\n")

    def _stream(self, text: str) -> None:
        self._write(text)
        if found := _RUNNING_IN.search(text):
            self._note(f"container:{found[1]}")
        elif "---> Using cache" in text:
            self._cached = True
        elif found := _LAYER_ID.search(text):
            if not self._cached:  # else another build made it, and may need it
                self._note(f"image:{found[1]}")
            self._cached = False

    def _write(self, text: str) -> None:
        if text.strip():
            self.last = text.strip().splitlines()[-1][:300]
        if self._file.tell() < _LOG_CAP:
            self._file.write(text)
            self._file.flush()


@dataclass(frozen=True, slots=True)
class Job:
    """One image to build. `limit_s` bounds the engine's silence; the caller ends the build by `cut` when time is up."""

    context: Context
    tag: str
    task: str  # for people
    log_path: Path
    limit_s: float
    cut: CutOff


def build(address: str, job: Job, *, registry: Path, run_id: str) -> str:
    """Build and tag the image; its id. Leaves nothing but the image (and the layers it stands on), or nothing at all.

    Raises SetupFailed (the image cannot be built, or was cut off), LifecycleError, or one of ENGINE_ERRORS; after the
    last the claim stays on record.
    """
    owned = claim(registry, "image_build", run_id=run_id, engine=engine_of(address))

    def note(made: str) -> None:
        owned.unlabelled.append(made)
        owned.save()

    with contextlib.ExitStack() as stack:
        api = stack.enter_context(contextlib.closing(connect(address)))
        log = stack.enter_context(contextlib.closing(BuildLog(job.log_path, note)))
        api.create_volume(owned.id, labels=labels_of(owned, BUILD))
        stack.callback(_clean_up, api, owned, job.cut)
        labels = image_labels(owned, task=job.task, content=job.context.digest)
        try:
            _run(address, job, labels, log)
        except SetupFailed as e:
            if job.cut.done or not _LOST_LAYER.search(str(e)):
                raise
            # Another build failed and took a layer of its own along that this one had found in the cache.
            _run(address, job, labels, log)
        return str(api.inspect_image(job.tag)["Id"])


def _run(address: str, job: Job, labels: dict[str, str], log: BuildLog) -> None:
    timeout_s = job.limit_s + 60.0  # a dead engine must not hold this thread for ever
    api = connect(address, timeout_s=timeout_s)  # of its own: cutting it off ends nothing else
    job.cut.watch(api)
    try:
        with job.context.archive() as archive:
            stream = api.build(
                fileobj=job.cut.guard(archive),
                custom_context=True,
                dockerfile="Dockerfile",
                tag=job.tag,
                labels=labels,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=timeout_s,
            )
            for message in stream:
                log.message(message)
        if job.cut.done:
            raise SetupFailed("the build was cut off", log.path)
    except ENGINE_ERRORS as e:
        if job.cut.done:  # a broken connection is what cutting looks like
            raise SetupFailed("the build was cut off", log.path) from e
        if isinstance(e, APIError):
            log.message({"error": reason(e)})
        raise
    finally:
        api.close()


def _clean_up(api: docker.APIClient, owned: Claim, cut: CutOff) -> None:
    api.remove_volume(owned.id, force=True)
    remove_build(api, owned.unlabelled)
    if cut.done:
        # The engine notices in its own time, and may have finished a layer that we were not told of.
        time.sleep(0.5)
        remove_build(api, owned.unlabelled)
    remove_stray(api)
    owned.release()


def pull(address: str, name: str, *, log_path: Path, limit_s: float, cut: CutOff) -> str:
    """Pull the image; its id. Raises SetupFailed when it cannot be had, or one of ENGINE_ERRORS."""
    api = connect(address, timeout_s=limit_s + 60.0)
    cut.watch(api)
    log = BuildLog(log_path, lambda _: None)
    repository, tag = parse_repository_tag(name)
    try:
        for message in api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            log.message(message)
        if cut.done:
            raise SetupFailed("the pull was cut off", log_path)
        return str(api.inspect_image(name)["Id"])
    except ENGINE_ERRORS as e:
        if cut.done:
            raise SetupFailed("the pull was cut off", log_path) from e
        if isinstance(e, APIError):
            log.message({"error": reason(e)})
        raise
    finally:
        log.close()
        api.close()


def find_image(api: docker.APIClient, name: str) -> str | None:
    """The id of an image that is there; None also for what can be no image's name. Raises one of ENGINE_ERRORS."""
    try:
        return str(api.inspect_image(name)["Id"])
    except ENGINE_ERRORS as e:
        if is_absent(e) or (isinstance(e, APIError) and e.status_code == 400):
            return None
        raise
