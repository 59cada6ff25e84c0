"""Moving what an agent made: into the fresh sandbox where it is tested, and to the rollout's artifacts for people.

Owns size caps, links and temp folders of these copies. Knows nothing of rewards; `verifier` is the only caller. On the
host everything is copied by `get_dir`, which never follows or writes a link that leaves the copy.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import posixpath
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness_trainer.rewards.base import Code, Finding
from harness_trainer.rewards.guard import shown
from harness_trainer.tasks import Artifact, Task
from sandboxes.base import Command, LeftOut, NoSuchPath, Sandbox, SandboxError, TooLarge
from sandboxes.lifecycle import Claim, LifecycleError, claim, default_registry, remove_tree

log = logging.getLogger(__name__)

PUBLISHED = "/logs/artifacts"  # Harbor's: what an agent puts there is an artifact of every task
_MAX_LINKS = 10_000

# Reads pairs of lines: where a link was, and where it pointed. Brings back those that lead to something which the fresh
# sandbox has of its own (an interpreter in a virtual environment, say); prints the others. The tests are not there yet.
_LINKS = r"""
while IFS= read -r link && IFS= read -r to; do
  if [ ! -e "$link" ] && [ ! -L "$link" ] && ln -s "$to" "$link" 2>/dev/null && [ -e "$link" ]; then continue; fi
  if [ -L "$link" ]; then rm -f "$link"; fi
  printf '%s\n' "$link"
done
"""


@dataclass(frozen=True, slots=True)
class Caps:
    """Most bytes that are copied out of a sandbox."""

    workspace: int = 2_000_000_000  # working directory and artifacts together, for a fresh sandbox
    kept: int = 100_000_000  # of the verifier's logs, and of each artifact, for people


DEFAULT_CAPS = Caps()


@dataclass(slots=True)
class Snapshot:
    """A copy of what the tests shall see, on this host. Example: Snapshot([("/app", Path("/tmp/x/0"), True)], [])."""

    copies: list[tuple[str, Path, bool]] = field(default_factory=list)  # path inside, copy, whether it is a folder
    links: list[tuple[str, str]] = field(default_factory=list)  # path inside, where it points; not in the copies
    findings: list[Finding] = field(default_factory=list)


@asynccontextmanager
async def scratch_folder(registry: Path | None) -> AsyncIterator[Path]:
    """A temp folder that is on record while it exists, so that it is removed even if this process is killed."""
    try:
        owned = claim(registry or default_registry(), "workspace")
        folder = owned.make_folder(Path(tempfile.gettempdir()))
    except (LifecycleError, OSError) as e:
        raise SandboxError(f"cannot make a folder for the agent's workspace: {e}") from e
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, owned, folder))


def _remove(owned: Claim, folder: Path) -> None:
    try:
        remove_tree(folder)
        owned.release()
    except OSError as e:
        log.warning("%s is left behind and stays on record for the next start: %s", folder, e)


def sources(task: Task, workdir: str) -> list[str]:
    """What the tests may need of the agent's sandbox: absolute paths, none below another. The first is `workdir`."""
    chosen = [posixpath.normpath(workdir)]
    for source in (PUBLISHED, *(artifact.source for artifact in task.artifacts)):
        path = posixpath.normpath(posixpath.join(workdir, source))
        if path != "/" and not any(path == other or path.startswith(other.rstrip("/") + "/") for other in chosen):
            chosen.append(path)
    return chosen


async def take(box: Sandbox, paths: Sequence[str], folder: Path, cap: int) -> Snapshot:
    """Copy `paths` (the first is the working directory) of `box` into `folder`. Raises TooLarge above `cap` bytes."""
    snapshot = Snapshot()
    left, special = cap, []
    for number, path in enumerate(paths):
        copy = folder / str(number)
        try:
            left_out = await box.get_dir(path, copy, cap=left)
        except NoSuchPath:
            if number == 0:
                snapshot.copies.append((path, copy, True))
                await asyncio.to_thread(copy.mkdir, exist_ok=True)
                snapshot.findings.append(Finding(Code.WORKSPACE_MISSING, f"{path} is no folder any more"))
            elif await _take_file(box, path, copy, left):
                snapshot.copies.append((path, copy, False))
        else:
            snapshot.copies.append((path, copy, True))
            special += [posixpath.join(path, entry.name) for entry in left_out if entry.link is None]
            snapshot.links += _inner_links(path, left_out)
        left -= await asyncio.to_thread(_size, copy)
    if special:
        snapshot.findings.append(Finding(Code.ENTRY_DROPPED, f"no file, folder or link: {shown(special)}"))
    return snapshot


async def _take_file(box: Sandbox, path: str, copy: Path, cap: int) -> bool:
    try:
        await box.get_file(path, copy, cap=cap)
    except NoSuchPath:
        return False
    return True


def _inner_links(path: str, left_out: Sequence[LeftOut]) -> list[tuple[str, str]]:
    """Absolute positions of the links that were left out; a name that climbs out of the folder is nobody's."""
    found = []
    for entry in left_out:
        at = posixpath.normpath(posixpath.join(path, entry.name))
        if entry.link and at.startswith(path.rstrip("/") + "/") and "\n" not in at + entry.link:
            found.append((at, entry.link))
    return found


async def give(snapshot: Snapshot, box: Sandbox) -> list[Finding]:
    """Put the copies into a fresh sandbox, in place of whatever its image has there."""
    for path, copy, is_folder in snapshot.copies:
        if is_folder:
            await box.reset_dir(path)
            await box.put_dir(copy, path)
        else:
            await box.put_file(copy, path)
    if not snapshot.links:
        return []
    lines = [box.resolve(at) + "\n" + to for at, to in snapshot.links[:_MAX_LINKS]]
    done = await box.run(Command(["/bin/sh", "-c", _LINKS], cwd="/", stdin="\n".join(lines) + "\n", timeout_s=120.0))
    dropped = done.stdout.splitlines() + [at for at, _ in snapshot.links[_MAX_LINKS:]]
    if not dropped:
        return []
    return [Finding(Code.LINK_DROPPED, f"left the workspace, or led nowhere: {shown(dropped)}")]


def _size(copy: Path) -> int:
    if not copy.is_dir():
        return copy.stat().st_size if copy.exists() else 0
    return sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(copy) for name in names)


# --- for people ---------------------------------------------------------------------------------------------------


async def keep_artifacts(task: Task, box: Sandbox, folder: Path, cap: int) -> list[Finding]:
    """Copy the task's artifacts below `folder`, laid out as in Harbor: by their source path or their destination."""
    findings = []
    for artifact in (Artifact(PUBLISHED), *task.artifacts):
        source = posixpath.normpath(posixpath.join(box.workdir, artifact.source))
        target = folder.joinpath(*(part for part in Path(artifact.destination or source).parts if part not in "/.."))
        findings += await _keep(box, source, target, cap)
        if artifact.exclude:
            await asyncio.to_thread(_exclude, target, artifact.exclude)
    return findings


async def keep_logs(box: Sandbox, path: str, folder: Path, cap: int) -> list[Finding]:
    return await _keep(box, path, folder, cap)


async def _keep(box: Sandbox, path: str, target: Path, cap: int) -> list[Finding]:
    """Whatever happens here, the reward stands: every failure is a finding."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            await box.get_dir(path, target, cap=cap)
        except NoSuchPath:
            await _take_file(box, path, target, cap)
    except TooLarge:
        await asyncio.to_thread(remove_tree, target)
        return [Finding(Code.FILES_NOT_KEPT, f"{path} holds more than {cap // 1_000_000} MB")]
    except (SandboxError, OSError) as e:
        return [Finding(Code.FILES_NOT_KEPT, f"{path}: {e}")]
    await asyncio.to_thread(_drop_empty, target)
    return []


def _drop_empty(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()


def _exclude(target: Path, patterns: Sequence[str]) -> None:
    """Like tar's --exclude: a pattern matches an entry's name or its path below the folder."""
    for at, folders, names in os.walk(target):
        for name in [*folders, *names]:
            path = Path(at, name)
            relative = path.relative_to(target).as_posix()
            if any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(relative, p.removeprefix("./")) for p in patterns):
                remove_tree(path)
        folders[:] = [name for name in folders if Path(at, name).exists()]
