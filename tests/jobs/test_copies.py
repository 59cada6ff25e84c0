"""Copies of a folder on the Hub and in a mounted folder: whole or not at all, and of one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.copies import Copies, FolderCopy, HubCopy, publish
from jobs.errors import CopyTaken, JobsError
from jobs.hf import client
from tests.jobs.standin import Standin

BIG = bytes(range(256)) * 20


def write(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["hub", "folder"])
def where(request: pytest.FixtureRequest, hub: Standin, tmp_path: Path) -> object:
    """Makes a writer of one and the same copy, as each job does."""
    if request.param == "hub":
        return lambda run="math": HubCopy(client(), "me/runs", run)
    return lambda run="math": FolderCopy(tmp_path / "volume" / run)


def pulled(copy: Copies, folder: Path) -> dict[str, bytes] | None:
    folder.mkdir(parents=True)
    return read(folder) if copy.pull(folder) else None


def test_what_is_pushed_comes_back_and_replaces_what_was(where: object, tmp_path: Path) -> None:
    first = {"checkpoints/checkpoint-1/model.bin": BIG, "config.yaml": b"a: 1\n", "empty": b""}
    second = {"checkpoints/checkpoint-2/model.bin": BIG[::-1], "config.yaml": b"a: 1\n"}
    copy: Copies = where()  # type: ignore[operator]
    assert pulled(where(), tmp_path / "none") is None  # type: ignore[operator]
    copy.push(write(tmp_path / "one", first), "step 1")
    assert pulled(where(), tmp_path / "back1") == first  # type: ignore[operator]
    copy.push(write(tmp_path / "two", second), "step 2")
    assert pulled(where(), tmp_path / "back2") == second  # type: ignore[operator]
    assert pulled(where("other"), tmp_path / "other") is None  # type: ignore[operator]


def test_a_second_writer_of_the_same_run_is_found_out(where: object, tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"config.yaml": b"a: 1\n"})
    ours: Copies = where()  # type: ignore[operator]
    ours.push(files, "step 1")
    theirs: Copies = where()  # type: ignore[operator]
    pulled(theirs, tmp_path / "theirs")
    theirs.push(write(tmp_path / "files", {"config.yaml": b"a: 2\n"}), "step 2")
    with pytest.raises(CopyTaken, match="another job of this run"):
        ours.push(write(tmp_path / "files", {"config.yaml": b"a: 3\n"}), "step 2")
    assert pulled(where(), tmp_path / "back") == {"config.yaml": b"a: 2\n"}  # type: ignore[operator]


def test_runs_share_a_repository(where: object, tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"config.yaml": b"a: 1\n"})
    math, code = where("math"), where("code")  # type: ignore[operator]
    for number in range(3):
        for copy in (math, code):
            copy.push(write(tmp_path / "files", {"config.yaml": b"a: %d\n" % number}), f"step {number}")
    assert pulled(where("math"), tmp_path / "back") == read(tmp_path / "files") and files  # type: ignore[operator]


def test_a_push_is_one_commit_and_sends_only_what_is_new(hub: Standin, tmp_path: Path) -> None:
    copy = HubCopy(client(), "me/runs", "math")
    files = write(tmp_path, {"model.bin": BIG, "log": b"1"})
    copy.push(files, "one")
    num = len(hub.repos.commits["me/runs"])
    hub.asked.clear()
    copy.push(write(tmp_path, {"log": b"12"}) | {"model.bin": files["model.bin"]}, "two")
    assert len(hub.repos.commits["me/runs"]) == num + 1
    assert not any("/store/" in path for path in hub.asked)
    copy.push(files, "nothing new")
    assert len(hub.repos.commits["me/runs"]) == num + 1


def test_a_push_that_fails_leaves_the_old_copy(hub: Standin, tmp_path: Path) -> None:
    copy = HubCopy(client(), "me/runs", "math")
    copy.push(write(tmp_path / "a", {"config.yaml": b"old"}), "one")
    hub.repos.refuses = 1
    newer = write(tmp_path / "b", {"config.yaml": b"new", "model.bin": BIG})
    with pytest.raises(JobsError, match="500"):
        copy.push(newer, "two")
    assert pulled(HubCopy(client(), "me/runs", "math"), tmp_path / "back") == {"config.yaml": b"old"}
    copy.push(newer, "two")
    assert pulled(HubCopy(client(), "me/runs", "math"), tmp_path / "again") == read(tmp_path / "b")


def test_a_commit_whose_answer_was_lost_is_known_as_our_own(hub: Standin, tmp_path: Path) -> None:
    copy = HubCopy(client(), "me/runs", "math")
    copy.push(write(tmp_path / "a", {"config.yaml": b"old", "gone": b""}), "one")
    hub.repos.forgets = 1
    with pytest.raises(JobsError, match="504"):
        copy.push(write(tmp_path / "b", {"config.yaml": b"new"}), "two")
    HubCopy(client(), "me/runs", "code").push(write(tmp_path / "c", {"config.yaml": b"of another run"}), "one")
    copy.push(write(tmp_path / "b", {"config.yaml": b"newer"}), "three")
    assert pulled(HubCopy(client(), "me/runs", "math"), tmp_path / "back") == {"config.yaml": b"newer"}


def test_a_commit_whose_answer_was_lost_hides_no_other_writer(hub: Standin, tmp_path: Path) -> None:
    copy, files = HubCopy(client(), "me/runs", "math"), write(tmp_path / "b", {"config.yaml": b"new"})
    copy.push(write(tmp_path / "a", {"config.yaml": b"old"}), "one")
    hub.repos.forgets = 1
    with pytest.raises(JobsError, match="504"):
        copy.push(files, "two")
    theirs = HubCopy(client(), "me/runs", "math")
    theirs.push(write(tmp_path / "c", {"config.yaml": b"theirs"}), "two")
    for _ in range(2):
        with pytest.raises(CopyTaken, match="another job of this run"):
            copy.push(files, "two")


def test_a_killed_push_to_a_folder_leaves_the_old_copy(tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path / "volume")
    copy.push(write(tmp_path / "a", {"config.yaml": b"old"}), "one")
    (tmp_path / "volume" / "copy-2").mkdir()
    (tmp_path / "volume" / "copy-2" / "half").write_bytes(b"")
    again = FolderCopy(tmp_path / "volume")
    assert pulled(again, tmp_path / "back") == {"config.yaml": b"old"}
    again.push(write(tmp_path / "b", {"config.yaml": b"new"}), "two")
    assert pulled(FolderCopy(tmp_path / "volume"), tmp_path / "back2") == {"config.yaml": b"new"}
    assert sorted(path.name for path in (tmp_path / "volume").iterdir()) == ["copy-2", "current.json"]


def test_a_volume_that_is_full_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "volume").write_bytes(b"")  # nothing can be made below it
    with pytest.raises(JobsError, match="check the volume|cannot be read"):
        FolderCopy(tmp_path / "volume" / "run").push(write(tmp_path / "a", {"x": b""}), "one")


def test_a_trained_model_gets_a_repository_of_its_own(hub: Standin, tmp_path: Path) -> None:
    write(
        tmp_path / "model", {"model.safetensors": BIG, "README.md": b"---\nlicense: mit\n---\n", "config.json": b"{}"}
    )
    assert publish(client(), "acme/model", tmp_path / "model", "trained") == f"{hub.url}/acme/model"
    files = hub.repos.files("acme/model")
    assert files["model.safetensors"] == BIG and set(files) == {".gitattributes", *read(tmp_path / "model")}
