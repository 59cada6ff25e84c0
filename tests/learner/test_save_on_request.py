"""A checkpoint on request: for a machine that is about to go away."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import PolicySource, Transfer

from harness_trainer.learner import checkpoints
from harness_trainer.learner.checkpoints import last_checkpoint, read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.train import run_learner


class Leaving(Exception):
    """What ends the run in these tests, as Ctrl-C does."""


class AskingSource(PolicySource):
    """Asks for a checkpoint when it is asked for group `at`; what is there when it is asked again is `seen`."""

    def __init__(self, model_path: Path, transfer: Transfer, folder: Path, *, at: int, waits: bool) -> None:
        super().__init__(model_path, transfer)
        self.folder, self.at, self.waits = folder, at, waits
        self.asked = False
        self.seen: Path | None = None

    def next_group(self, timeout_s: float) -> object:
        if self.next_id == self.at and not self.asked:
            self.asked = True
            checkpoints.request(self.folder)
            if self.waits:
                return None  # the learner waits on, and looks
        if self.next_id == self.at + (0 if self.waits else 1):
            assert not checkpoints.is_requested(self.folder)
            self.seen = last_checkpoint(self.folder)
            raise Leaving
        return super().next_group(timeout_s)


def run_until_left(model: Path, folder: Path, *, at: int, waits: bool) -> AskingSource:
    transfer = Transfer()
    source = AskingSource(model, transfer, folder, at=at, waits=waits)
    config = LearnerConfig(max_steps=9, groups_per_step=1, token_budget=64, save_steps=9, device="cpu")
    with pytest.raises(Leaving):
        run_learner(
            config,
            model_path=model,
            output_dir=folder,
            group_source=source,
            weight_transfer=transfer,
            on_step=lambda report: None,
            resume_from=None,
            base_version=0,
        )
    return source


def test_a_learner_that_waits_saves_at_once(tiny_model: Path, tmp_path: Path) -> None:
    source = run_until_left(tiny_model, tmp_path / "checkpoints", at=2, waits=True)
    assert source.seen is not None and source.seen.name == "checkpoint-2"
    state = read_state(source.seen)
    assert (state.step, state.policy_version, state.trained_groups) == (2, 3, {1: [0], 2: [1]})


def test_a_learner_in_a_step_saves_at_its_end(tiny_model: Path, tmp_path: Path) -> None:
    source = run_until_left(tiny_model, tmp_path / "checkpoints", at=1, waits=False)
    assert source.seen is not None and source.seen.name == "checkpoint-2"
    assert read_state(source.seen).trained_groups == {1: [0], 2: [1]}


def test_before_the_first_step_there_is_nothing_to_save(tiny_model: Path, tmp_path: Path) -> None:
    source = run_until_left(tiny_model, tmp_path / "checkpoints", at=0, waits=True)
    assert source.seen is None
