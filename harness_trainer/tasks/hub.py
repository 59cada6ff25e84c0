"""Task folders in a dataset repository of the Hugging Face Hub.

Owns how such a repository is named, downloaded and kept. The download is `huggingface_hub`'s, with its cache, token and
settings (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). Its cache holds links into a blob store, which sandboxes refuse to
copy, so each commit is copied once into a folder of plain files: `<cache>/tasks/<owner>--<name>/<commit>`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness_trainer.cache import cache_dir
from harness_trainer.errors import TaskError

_PREFIX = "hf:"
_PART = r"[A-Za-z0-9][\w.-]*"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATASET = re.compile(rf"({_PART}/{_PART})(?:@([\w.%-]+))?(?:/(.+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Example: Dataset("owner/name", "v1.2", "easy") for hf:owner/name@v1.2/easy."""

    repo_id: str
    revision: str | None = None  # branch, tag or commit; None = the default branch
    subfolder: str = ""  # "" = the whole repository


def as_dataset(word: str) -> Dataset | None:
    """The dataset that a word of a spec names, or None when it names none.

    `hf:owner/name[@revision][/subfolder]`; without `hf:` only `owner/name[@revision]`, and only where no folder `owner`
    exists, so that a mistyped path is not looked for on the Hub. A slash within a revision is written %2F. Raises
    TaskError for an `hf:` that is not of this form.
    """
    explicit = word.startswith(_PREFIX)
    match = _DATASET.fullmatch(word.removeprefix(_PREFIX))
    repo_id, revision, subfolder = match.groups(default="") if match else ("", "", "")
    revision, subfolder = revision.replace("%2F", "/").replace("%2f", "/"), subfolder.strip("/")
    if not match or {".", ".."} & {*revision.split("/"), *subfolder.split("/")} or revision.startswith("/"):
        if explicit:
            raise TaskError(f"{word!r} names no dataset: write hf:owner/name, hf:owner/name@revision or .../subfolder")
        return None
    if not explicit and (subfolder or Path(repo_id).parent.exists()):
        return None
    return Dataset(repo_id, revision or None, subfolder)


def download(dataset: Dataset) -> Path:
    """The folder of plain files that the dataset names; nothing is asked when its commit is named and was kept.

    Raises TaskError that says what to do.
    """
    if (
        dataset.revision
        and _COMMIT.fullmatch(dataset.revision)
        and (kept := _place(dataset, dataset.revision)).is_dir()
    ):
        return kept
    with _explained(dataset):
        snapshot = _snapshot(dataset)
        if not (snapshot / dataset.subfolder).is_dir():
            raise TaskError(f"dataset {dataset.repo_id!r} has no folder {dataset.subfolder!r}; see {_page(dataset)}")
        place = _place(dataset, snapshot.name)
        if not place.is_dir():
            _copy(snapshot, dataset.subfolder, place)
    return place


def pin(dataset: Dataset) -> str:
    """The same dataset as a spec that names the commit it is at now (downloading it). Raises TaskError."""
    with _explained(dataset):
        commit = _snapshot(dataset).name
    return f"{_PREFIX}{dataset.repo_id}@{commit}" + (f"/{dataset.subfolder}" if dataset.subfolder else "")


def _snapshot(dataset: Dataset) -> Path:
    """Where huggingface_hub keeps the commit: .../snapshots/<commit>, with links into .../blobs."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            dataset.repo_id,
            repo_type="dataset",
            revision=dataset.revision,
            allow_patterns=f"{dataset.subfolder}/*" if dataset.subfolder else None,
            cache_dir=os.environ.get("HF_HUB_CACHE"),  # read now: the library reads both when it is imported
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    )


def _place(dataset: Dataset, commit: str) -> Path:
    """Where plain files are kept. Its last part is what a task without a name of its own is called."""
    part = dataset.subfolder.replace("/", "+") or "all"
    leaf = PurePosixPath(dataset.subfolder or dataset.repo_id).name
    return cache_dir() / "tasks" / dataset.repo_id.replace("/", "--") / commit / part / leaf


def _copy(snapshot: Path, subfolder: str, place: Path) -> None:
    """Copy links' targets as files. Whole or not there: made under another name and renamed."""
    blobs = (snapshot.parent.parent / "blobs").resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as temp:
        whole = Path(temp, "whole")
        for parent, _, names in os.walk(snapshot / subfolder):
            folder = whole / Path(parent).relative_to(snapshot / subfolder)
            folder.mkdir(parents=True)
            for entry in (Path(parent, name) for name in names):
                if entry.is_symlink() and not entry.resolve().is_relative_to(blobs):
                    raise TaskError(f"{entry}: this file of the Hub's cache leads out of it; remove it and try again")
                shutil.copyfile(entry, folder / entry.name)
        try:
            whole.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise


@contextmanager
def _explained(dataset: Dataset) -> Iterator[None]:
    """Whatever goes wrong with the Hub, as one line that says what to do."""
    from huggingface_hub import errors

    what = f"dataset {dataset.repo_id!r}"
    try:
        yield
    except errors.GatedRepoError as e:
        raise TaskError(f"{what} is gated: ask for access at {_page(dataset)} and set HF_TOKEN") from e
    except errors.RepositoryNotFoundError as e:
        raise TaskError(f"{what} is not on the Hub; check the name, or set HF_TOKEN if it is private") from e
    except errors.RevisionNotFoundError as e:
        raise TaskError(f"{what} has no revision {dataset.revision!r}; see {_page(dataset)}") from e
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as e:
        raise TaskError(
            f"{what} cannot be reached and is not in the cache ({_first_line(e.__cause__ or e)}); check the network and"
            " HF_ENDPOINT, unset HF_HUB_OFFLINE, or download it once while online"
        ) from e
    except errors.HfHubHTTPError as e:
        raise TaskError(f"{what}: the Hub answered {_first_line(e)}; try again, or check HF_TOKEN") from e
    except (OSError, ValueError, RuntimeError) as e:
        raise TaskError(f"{what} cannot be downloaded: {_first_line(e)}") from e


def _page(dataset: Dataset) -> str:
    return f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/datasets/{dataset.repo_id}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
