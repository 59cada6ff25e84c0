"""A folder's files kept somewhere that outlives this machine: on the Hub, or in a mounted folder.

Owns how a copy is replaced: as one whole, so that whoever reads it finds the old one or the new one. Which files make a
copy worth having is the caller's. Called from the process in a job.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jobs.errors import CopyTaken, JobsError
from jobs.hf import asked

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi

_POINTER = "current.json"
_TRIES = 5


class Copies(Protocol):
    """Where one run is kept. Blocking; not for two threads."""

    @property
    def where(self) -> str:
        """For people."""
        ...

    def push(self, files: Mapping[str, Path], message: str) -> str:
        """Make the copy these files (path in the copy -> file here) and nothing else; where it is now.

        Raises JobsError, and CopyTaken when another writer has replaced it since this object read or wrote it.
        """
        ...

    def pull(self, into: Path) -> bool:
        """Put the copy's files into the folder; False = there is none. Raises JobsError."""
        ...


class HubCopy:
    """Below `folder` of a model repository. A push is one commit on top of the one that was seen last.

    A commit may be made and its answer lost (large ones take long): each says who wrote it, so that it is known again.
    """

    def __init__(self, api: HfApi, repo_id: str, folder: str) -> None:
        self._api = api
        self._repo_id = repo_id
        self._folder = folder.strip("/")
        self._seen: dict[str, tuple[int, str]] = {}  # path below the folder -> size and time of what was pushed
        self._head: str | None = None  # None = not looked yet
        self._writer = f"writer {secrets.token_hex(8)}"
        self._is_unsure = False  # whether our last commit was made

    @property
    def where(self) -> str:
        return f"{self._api.endpoint}/{self._repo_id}/tree/main/{self._folder}"

    def pull(self, into: Path) -> bool:
        head = self._look()
        there = self._files(head)
        if not there:
            return False
        # Through a folder of its own: a download that breaks off leaves nothing that looks like a run.
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".pull-") as temp:
            asked(
                lambda: self._api.snapshot_download(
                    self._repo_id, revision=head, local_dir=temp, allow_patterns=f"{self._folder}/*"
                ),
                f"the copy in {self._repo_id}",
            )
            with _disk_errors(into):
                for path in there:
                    target = into / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(temp, self._folder, path), target)
        return True

    def push(self, files: Mapping[str, Path], message: str) -> str:
        head = self._settled() if self._is_unsure else self._head or self._look()
        there = self._files(head)
        marks = {path: _mark(file) for path, file in files.items()}
        # A file that was pushed and has not changed since is not read again.
        new = {path: file for path, file in files.items() if path not in there or self._seen.get(path) != marks[path]}
        gone = sorted(there.keys() - files.keys())
        if new or gone:
            self._commit(new, gone, message)
        self._seen = marks
        return self.where

    def _commit(self, new: Mapping[str, Path], gone: list[str], message: str) -> None:
        """One commit on the head that we know. Other runs may keep their copies in the same repository meanwhile."""
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_TRIES):
            head = self._head or self._look()
            try:
                self._is_unsure = True
                self._head = self._commit_on(head, new, gone, message)
                self._is_unsure = False
                return
            except JobsError as error:
                cause = error.__cause__
                if not isinstance(cause, HfHubHTTPError) or cause.response.status_code not in (409, 412):
                    raise
                self._is_unsure = False
                if self._files(self._look()) != self._files(head):
                    raise self._taken() from error
        raise JobsError(f"{self._repo_id} changed under each of {_TRIES} pushes: keep fewer runs in one repository")

    def _settled(self) -> str:
        """The commit to go on from when our last one may have been made or not. Raises CopyTaken."""
        before, head = str(self._head), self._look()
        if self._files(head) != self._files(before) and not self._is_own(head, before):
            self._head = before
            raise self._taken()
        self._is_unsure = False
        return head

    def _is_own(self, head: str, before: str) -> bool:
        """Whether what the folder holds at `head` is of a commit that this object has made since `before`."""
        what = f"the repository {self._repo_id}"
        for commit in asked(lambda: list(self._api.list_repo_commits(self._repo_id, revision=head)), what):
            if commit.commit_id == before:
                return False
            if self._writer in commit.message:
                return self._files(commit.commit_id) == self._files(head)
        return False

    def _taken(self) -> CopyTaken:
        return CopyTaken(
            f"{self.where} was changed by somebody else: is another job of this run alive? "
            "`harness-trainer launch hf-jobs ls` shows them"
        )

    def _commit_on(self, head: str, new: Mapping[str, Path], gone: list[str], message: str) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
            *(CommitOperationDelete(f"{self._folder}/{path}") for path in gone),
            *(CommitOperationAdd(f"{self._folder}/{path}", str(file)) for path, file in sorted(new.items())),
        ]
        done = asked(
            lambda: self._api.create_commit(
                self._repo_id,
                operations,
                commit_message=message,
                commit_description=self._writer,
                parent_commit=head,
            ),
            f"the copy in {self._repo_id}",
        )
        return str(done.oid)

    def _look(self) -> str:
        """The commit that the repository is at; the repository is made where it is missing."""
        what = f"the repository {self._repo_id}"
        asked(lambda: self._api.create_repo(self._repo_id, private=True, exist_ok=True), what)
        head = asked(lambda: self._api.repo_info(self._repo_id), what).sha
        if head is None:
            raise JobsError(f"{what} has no commit; remove it, and it is made anew")
        self._head = str(head)
        return self._head

    def _files(self, head: str) -> dict[str, str]:
        """Path below the folder -> id of its content."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import EntryNotFoundError

        def ask() -> dict[str, str]:
            try:
                found = list(self._api.list_repo_tree(self._repo_id, self._folder, recursive=True, revision=head))
            except EntryNotFoundError:
                return {}
            prefix = f"{self._folder}/"
            return {one.path.removeprefix(prefix): one.blob_id for one in found if isinstance(one, RepoFile)}

        return asked(ask, f"the repository {self._repo_id}")


def publish(api: HfApi, repo_id: str, folder: Path, message: str) -> str:
    """A folder as a model repository of its own, in one commit; its address. Raises JobsError."""
    from huggingface_hub import CommitOperationAdd

    asked(lambda: api.create_repo(repo_id, private=True, exist_ok=True), f"the repository {repo_id}")
    operations = [
        CommitOperationAdd(str(path.relative_to(folder)), str(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    asked(lambda: api.create_commit(repo_id, operations, commit_message=message), f"the repository {repo_id}")
    return f"{api.endpoint}/{repo_id}"


class FolderCopy:
    """In a folder of a mounted volume: each copy in a folder of its own, and a small file that names the current one.

    A volume may be a bucket, which can neither rename folders nor lock; so the name of a copy is never used twice, and
    the pointer is written last.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: str | None = None  # the copy that this object has seen or made last

    @property
    def where(self) -> str:
        return str(self._folder)

    def pull(self, into: Path) -> bool:
        self._current = self._pointed()
        if self._current is None:
            return False
        with _disk_errors(self._folder):
            shutil.copytree(self._folder / self._current, into, dirs_exist_ok=True)
        return True

    def push(self, files: Mapping[str, Path], message: str) -> str:
        before = self._pointed()
        if before != self._current:
            raise CopyTaken(f"{self._folder} was changed by somebody else: is another job of this run alive?")
        number = 1 + int(before.rpartition("-")[2]) if before else 1
        name = f"copy-{number}"
        with _disk_errors(self._folder):
            shutil.rmtree(self._folder / name, ignore_errors=True)  # of a push that was killed
            for path, file in files.items():
                target = self._folder / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            pointer = self._folder / f".{_POINTER}"
            pointer.write_text(json.dumps({"copy": name, "message": message}), encoding="utf-8")
            os.replace(pointer, self._folder / _POINTER)
            for old in self._folder.glob("copy-*"):
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)
        self._current = name
        return str(self._folder / name)

    def _pointed(self) -> str | None:
        try:
            return str(json.loads((self._folder / _POINTER).read_text(encoding="utf-8"))["copy"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobsError(f"{self._folder / _POINTER} cannot be read ({error}): remove it to begin anew") from error


def _mark(file: Path) -> tuple[int, str]:
    status = file.stat()
    return status.st_size, f"{status.st_mtime_ns}-{status.st_ino}"


class _disk_errors:
    """An OSError below `folder` as JobsError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise JobsError(
                f"the copy in {self._folder} failed: {error.strerror or error}; check the volume"
            ) from error
