"""E2B templates built from a task's Dockerfile, each once.

Owns the template's name (a hash over the folder and its size, so that equal tasks share one), when it is built, and the
build's log. Building is the SDK's: it turns a Dockerfile into steps for E2B's own builder, and understands no
multi-stage files. Called by `e2b`. E2B keeps a failed or unfinished template under its name too, so a name alone proves
nothing: a note in our cache says that this machine has seen it built.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import httpx
from e2b import AsyncTemplate
from e2b.exceptions import AuthenticationException, BuildException, RateLimitException, ServiceBusyException
from e2b.template.main import TemplateBuilder

from sandboxes.base import BoxSpec, SandboxError, SetupFailed
from sandboxes.build_folder import digest_of, entry_parts
from sandboxes.e2b_service import E2B_ERRORS, Connection, as_sandbox_error, end_task, said

RETRY_AFTER_S = 300.0  # a failed build is not tried again before
_SCHEME = "1"  # of the hash; another one builds every template anew
_ADVICE = "build a template with the e2b command line and name it as `image` in task.toml"


def default_cache() -> Path:
    """Where notes and logs are kept: `e2b` in the project's cache folder."""
    own = os.environ.get("HARNESS_TRAINER_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness-trainer"
    return (Path(own) if own else base) / "e2b"


class Templates:
    """The templates of one run. Close it: a build that still runs is no longer waited for, and goes on at E2B."""

    def __init__(self, connection: Connection, *, cache: Path | None = None, max_building: int = 2) -> None:
        self._options = connection.options()
        self._cache = cache or default_cache()
        self._building = asyncio.Semaphore(max_building)
        self._tasks: dict[str, asyncio.Task[str]] = {}
        self._failed: dict[str, tuple[float, SetupFailed]] = {}  # monotonic seconds

    async def ensure(self, spec: BoxSpec, default: str) -> str:
        """The name of the template for `spec`, built if need be; `default` is for a spec that names none.

        Raises SetupFailed when it cannot be had, with the path of its log, and SandboxError when E2B fails.
        """
        if spec.image is not None or spec.build_dir is None:
            return spec.image or default
        name = await asyncio.to_thread(template_name, spec)
        when, failed = self._failed.get(name, (0.0, None))
        if failed is not None and time.monotonic() - when < RETRY_AFTER_S:
            raise SetupFailed(str(failed), failed.log_path)
        task = self._tasks.get(name)
        if task is None:  # everybody who asks waits for the same task, which goes on when one of them is cancelled
            task = self._tasks[name] = asyncio.create_task(self._make(name, spec), name=f"template {name}")
        try:
            return await asyncio.shield(task)
        except SetupFailed as e:
            raise SetupFailed(str(e), e.log_path) from e  # each has a traceback of its own

    def forget(self, name: str) -> None:
        """E2B cannot make sandboxes of it (any more): build it again when it is next asked for."""
        task = self._tasks.get(name)
        if task is not None and task.done():
            del self._tasks[name]
            self._note(name).unlink(missing_ok=True)

    async def close(self) -> None:
        await asyncio.gather(*map(end_task, list(self._tasks.values())))

    def _note(self, name: str) -> Path:
        return self._cache / "built" / name

    async def _make(self, name: str, spec: BoxSpec) -> str:
        try:
            note = self._note(name)
            if not note.exists() or not await AsyncTemplate.exists(name, **self._options):
                await self._build(name, spec)
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
            return name
        except SetupFailed as e:
            self._failed[name] = (time.monotonic(), e)
            del self._tasks[name]
            raise
        except asyncio.CancelledError:
            del self._tasks[name]
            raise
        except E2B_ERRORS as e:
            del self._tasks[name]
            raise as_sandbox_error(e, "E2B's template could not be built") from e

    async def _build(self, name: str, spec: BoxSpec) -> None:
        log_path = self._cache / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        limits = spec.limits
        async with self._building:
            with log_path.open("w") as log:
                template = _parse(spec, log, log_path)
                building = AsyncTemplate.build(
                    template,
                    name,
                    cpu_count=None if limits.cpus is None else math.ceil(limits.cpus),
                    memory_mb=None if limits.memory_mb is None else limits.memory_mb + limits.memory_mb % 2,
                    on_build_logs=lambda entry: print(entry, file=log, flush=True),
                    **self._options,
                )
                task = asyncio.ensure_future(building)
                try:
                    await asyncio.wait({task}, timeout=spec.build_timeout_s)
                    if not task.done():
                        reason = f"the template of {spec.name} was not built in {spec.build_timeout_s:g} s"
                        raise SetupFailed(f"{reason}; see {log_path}", log_path)
                    await task
                except (AuthenticationException, RateLimitException, ServiceBusyException, httpx.TransportError):
                    raise
                except (BuildException, ValueError) as e:
                    print(said(e), file=log)
                    if isinstance(e, BuildException) and said(e).startswith(("500:", "502:", "504:")):
                        raise SandboxError(f"E2B failed at the template of {spec.name}: {said(e)}") from e
                    raise SetupFailed(
                        f"the template of {spec.name} does not build: {said(e)}; see {log_path}", log_path
                    ) from e
                finally:
                    await end_task(task)


def _parse(spec: BoxSpec, log: TextIO, log_path: Path) -> TemplateBuilder:
    assert spec.build_dir is not None
    dockerfile = spec.build_dir / "Dockerfile"
    if not dockerfile.is_file():
        raise SetupFailed(f"there is no Dockerfile in {spec.build_dir}")
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stdout(warnings):  # the SDK prints what it ignores
            return AsyncTemplate(file_context_path=spec.build_dir).from_dockerfile(str(dockerfile))
    except (ValueError, OSError) as e:
        print(said(e), file=log)
        raise SetupFailed(f"E2B cannot build {dockerfile} ({said(e)}): {_ADVICE}", log_path) from e
    finally:
        log.write(warnings.getvalue())


def template_name(spec: BoxSpec) -> str:
    """Equal for equal folders (names, modes, bytes, link targets) and sizes. Blocking. Raises SetupFailed."""
    assert spec.build_dir is not None
    try:
        digest = digest_of(_parts(spec, spec.build_dir))
    except OSError as e:
        raise SetupFailed(f"the image's folder {spec.build_dir} cannot be read: {e}") from e
    return f"harness-trainer-{digest[:24]}"


def _parts(spec: BoxSpec, folder: Path) -> Iterator[bytes]:
    yield f"{_SCHEME} {spec.limits.cpus} {spec.limits.memory_mb}".encode()
    for path in sorted(folder.rglob("*")):
        yield from entry_parts(folder, path.relative_to(folder))
