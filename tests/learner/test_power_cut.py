"""When the power goes off, what looks complete is so: a checkpoint, the final model, a small file, the hand-over."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from power_cut import Disk
from test_train import Run

from harness_trainer.config import RunConfig
from harness_trainer.learner.checkpoints import STATE_NAME, HarnessState, begin, complete, last_checkpoint
from harness_trainer.learner.final_model import write_final_model
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir, append_line, write_atomically


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    yield disk
    disk.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_checkpoint_that_is_found_is_whole_at_any_moment_of_a_run(
    tiny_model: Path, tmp_path: Path, disk: Disk
) -> None:
    """A real trainer, one checkpoint kept: the old one goes only when the new one is on the disk."""
    found: list[int] = []
    left: dict[str, dict[str, bytes]] = {}  # of each checkpoint as it was found first

    def look() -> None:
        newest = []
        for strict in (True, False):
            view = disk.view(tmp_path / "view", strict=strict)
            checkpoint = last_checkpoint(view)
            assert checkpoint is not None or not found, "there was one"
            if checkpoint is None:
                newest.append(0)
                continue
            newest.append(int(checkpoint.name.removeprefix("checkpoint-")))
            held = contents(checkpoint)
            assert all(held.values()), f"empty in {checkpoint.name}: {[n for n, data in held.items() if not data]}"
            real = disk.root / checkpoint.name
            if (real / STATE_NAME).exists():
                assert held == contents(real), "what is called complete is what was written"
            assert left.setdefault(checkpoint.name, held) == held
        found.append(min(newest)) if min(newest) else None

    with disk.moments(look):
        Run(tiny_model, disk.root).go(max_steps=3, save_steps=1, save_total_limit=1)
    assert found == sorted(found) and set(found) == {1, 2, 3}
    assert sorted(path.name for path in disk.root.glob("checkpoint-*")) == ["checkpoint-3"]
    assert disk.num_events > 30, "the model was looked at"


def test_the_model_of_the_disk_sees_what_is_not_synced(disk: Disk, tmp_path: Path) -> None:
    """The proof above would hold of anything if the model did not lose what a disk would lose."""
    views: list[tuple[bytes | None, bytes | None]] = []

    def look() -> None:
        both = []
        for strict in (True, False):
            file = disk.view(tmp_path / "view", strict=strict) / "b"
            both.append(file.read_bytes() if file.exists() else None)
        views.append((both[0], both[1]))

    with disk.moments(look):
        (disk.root / "a").write_text("new")
        (disk.root / "a").replace(disk.root / "b")
    assert views == [(None, None), (None, b"")]


def test_a_small_file_is_the_old_or_the_new_one_and_the_new_one_on_return(disk: Disk, tmp_path: Path) -> None:
    file = disk.root / "state.json"
    with disk.moments(lambda: None):
        write_atomically(file, "old")

    def look() -> None:
        for strict in (True, False):
            assert (disk.view(tmp_path / "view", strict=strict) / "state.json").read_text() in ("old", "new")

    with disk.moments(look):
        write_atomically(file, "new")
    for strict in (True, False):
        assert contents(disk.view(tmp_path / "view", strict=strict)) == {"state.json": b"new"}


def test_a_line_is_there_on_return(disk: Disk, tmp_path: Path) -> None:
    for count in (1, 2):
        with disk.moments(lambda: None):
            append_line(disk.root / "metrics.jsonl", "line")
        assert contents(disk.view(tmp_path / "view", strict=True)) == {"metrics.jsonl": b"line\n" * count}


def test_the_final_model_is_whole_or_not_there(tiny_model: Path, tmp_path: Path, disk: Disk) -> None:
    run = RunDir(disk.root)
    with disk.moments(lambda: None), run.opened(RunConfig(model=str(tiny_model)).model_dump(mode="json")):
        RolloutStore(run.store).close()
        Run(tiny_model, run.checkpoints).go(max_steps=1, save_steps=1)
    expected = write_final_model(run, tiny_model, target=tmp_path / "expected")
    seen = []

    def look() -> None:
        for strict in (True, False):
            model = disk.view(tmp_path / "view", strict=strict) / "model"
            seen.append(model.exists())
            assert not model.exists() or contents(model) == contents(expected)

    with disk.moments(look):
        write_final_model(run, tiny_model)
    assert seen[:2] == [False, False] and seen[-2:] == [True, True], "on the disk on return"


def made(folder: Path, step: int, keep: int | None) -> None:
    """A checkpoint as `trl_compat` makes one, of the smallest files that count as one."""
    checkpoint = folder / f"checkpoint-{step}"
    begin(checkpoint)
    checkpoint.mkdir(exist_ok=True)
    for name in ("model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (checkpoint / name).write_text(name)
    (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    complete(checkpoint, HarnessState(step, step + 1), keep=keep)


def test_older_checkpoints_go_and_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        made(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2"]
    made(tmp_path, 11, keep=None)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_cut_off_checkpoint_of_an_earlier_life_is_none_while_it_is_written_again(tmp_path: Path) -> None:
    """Its mark is taken away first: with new files beside it, it would speak for a mixture."""
    made(tmp_path, 4, keep=None)
    made(tmp_path, 5, keep=None)
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    begin(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_the_hand_over_between_runner_and_learner_is_synced_at_every_commit(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "store.sqlite")
    assert store._read("PRAGMA journal_mode") == [("wal",)]
    assert store._read("PRAGMA synchronous") == [(2,)], "FULL: a commit is on the disk when it returns"
    store.close()


def test_a_checkpoint_that_a_copy_made_whole_is_read_as_one(tmp_path: Path) -> None:
    made(tmp_path / "", 3, keep=None)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "elsewhere" / "checkpoint-3")
    assert last_checkpoint(tmp_path / "elsewhere") == tmp_path / "elsewhere" / "checkpoint-3"


def test_what_was_cut_off_takes_no_place_of_a_whole_checkpoint(tmp_path: Path) -> None:
    made(tmp_path, 10, keep=2)
    made(tmp_path, 13, keep=2)
    (tmp_path / "checkpoint-13" / STATE_NAME).unlink()
    made(tmp_path, 20, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]
    (
        tmp_path / "checkpoint-10" / "optimizer.pt"
    ).unlink()  # a person's: it is large, and weights are all that is wanted
    made(tmp_path, 25, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20", "checkpoint-25"]
    made(tmp_path, 30, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-30"]
