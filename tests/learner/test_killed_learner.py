"""A learner killed by SIGKILL between any two of its writes goes on: no group is trained twice, none is lost.

The engine survives each kill, which is the harder case: what it was sent last stays, under the name it was sent with.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from finished_groups import finish_group
from stub_engine import StubEngine, serving

from harness_trainer.learner.__main__ import LearnerSpec
from harness_trainer.learner.checkpoints import last_checkpoint, read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.store import RolloutStore

NUM_GROUPS, NUM_STEPS = 7, 3
SCRIPT = Path(__file__).with_name("killed_learner.py")


@dataclass
class RecordingEngine(StubEngine):
    """Remembers which weights were published under each name."""

    published: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def _behave(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = super()._behave(path, body)
        if path == "finish_weight_update" and body.get("weight_version"):
            self.published[body["weight_version"]].add(self.digest())
        return answer

    def digest(self) -> str:
        """Of the weights that it holds."""
        data = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(self.loaded.items()))
        return hashlib.sha256(data).hexdigest()


class Learner:
    """Runs the learner of one run folder, as often as wanted."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        engine: StubEngine,
        forks: subprocess.Popen[str],
        *,
        num_groups: int = NUM_GROUPS,
        max_staleness: int = 2,
    ) -> None:
        self.store_path, self.metrics = folder / "store.sqlite", folder / "metrics.jsonl"
        self.checkpoints, self._spec, self._trace = folder / "checkpoints", folder / "spec.json", folder / "trace"
        self._forks = forks
        for path in (self.checkpoints, folder / "transfer"):
            path.mkdir(parents=True)
        (folder / "engine_url").write_text(engine.url)
        config = LearnerConfig(
            max_steps=NUM_STEPS, groups_per_step=1, token_budget=64, max_staleness=max_staleness, save_steps=1,
            save_total_limit=1, learning_rate=0.01, device="cpu",
        )  # fmt: skip
        spec = LearnerSpec(
            config=config, model_path=model, store=self.store_path, checkpoints=self.checkpoints, metrics=self.metrics,
            engine_url_file=folder / "engine_url", transfer_dir=folder / "transfer", keep_weights=None, temperature=1.0,
            starved_after_s=30,
        )  # fmt: skip
        self._spec.write_text(spec.model_dump_json())
        self.store = RolloutStore(self.store_path)
        for group_id in range(num_groups):
            finish_group(self.store, group_id)

    def run(self, kill_at: int = -1) -> tuple[int, list[str]]:
        """The exit status and the events until then."""
        self._trace.write_text("")
        assert self._forks.stdin is not None and self._forks.stdout is not None
        self._forks.stdin.write(f"{self._spec} {kill_at} {self._trace}\n")
        self._forks.stdin.flush()
        return int(self._forks.stdout.readline()), self._trace.read_text().splitlines()

    def trained(self) -> dict[int, list[int]]:
        steps: dict[int, list[int]] = {}
        for step in range(1, NUM_STEPS + 1):
            steps[step] = sorted({result.group_id for result in self.store.trained_results(step)})
        return steps


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


MakeLearner = Callable[..., tuple[Learner, RecordingEngine]]


@pytest.fixture
def make_learner(tmp_path: Path, tiny_model: Path, forks: subprocess.Popen[str]) -> Iterator[MakeLearner]:
    made: list[tuple[Learner, Any]] = []

    def make(name: str, **settings: int) -> tuple[Learner, RecordingEngine]:
        engine = RecordingEngine()
        serving_engine = serving(engine)
        serving_engine.__enter__()
        learner = Learner(tmp_path / name, tiny_model, engine, forks, **settings)
        made.append((learner, serving_engine))
        return learner, engine

    yield make
    for learner, serving_engine in made:
        learner.store.close()
        serving_engine.__exit__(None, None, None)


def check(learner: Learner, engine: RecordingEngine, where: str) -> None:
    """The run is done, and as if it had never been killed."""
    checkpoint = last_checkpoint(learner.checkpoints)
    assert checkpoint is not None, where
    state = read_state(checkpoint)
    trained = learner.trained()
    assert state.step == NUM_STEPS and state.trained_groups == trained, where
    assert Counter(group_id for ids in trained.values() for group_id in ids) == {0: 1, 1: 1, 2: 1}, where
    assert learner.store.group_counts() == {"trained": NUM_STEPS, "ready": NUM_GROUPS - NUM_STEPS}, where
    assert [json.loads(line)["step"] for line in learner.metrics.read_text().splitlines()] == [1, 2, 3], where
    assert all(len(weights) == 1 for weights in engine.published.values()), where
    assert not engine.paused and not engine.active, where
    assert learner.store.policy_version() == int(engine.version.removeprefix("v")), where


def test_killed_between_any_two_writes_it_continues_without_training_a_group_twice_or_losing_one(
    make_learner: MakeLearner,
) -> None:
    learner, engine = make_learner("whole")
    code, events = learner.run()
    assert code == 0
    check(learner, engine, "never killed")
    # The first start's own writes, and those of a whole second step, whose checkpoint replaces another.
    marks = [index for index, event in enumerate(events) if event == "before mark_trained"]
    first_sync = events.index("after resume")
    points = [*range(first_sync + 2), *range(marks[1], marks[2])]
    assert {"after save_to_json", "after write_state", "after send_weights"} <= {events[i] for i in points}
    for point in points:
        where = f"killed {events[point]} (event {point})"
        learner, engine = make_learner(f"killed-{point}")
        code, seen = learner.run(kill_at=point)
        assert code == -9 and seen == events[: point + 1], where
        code, _ = learner.run()
        assert code == 0, where
        check(learner, engine, where)


def test_a_store_older_than_its_checkpoint_is_refused(
    make_learner: MakeLearner,
) -> None:
    learner, _ = make_learner("run")
    assert learner.run()[0] == 0
    learner.store.close()
    for file in learner.store_path.parent.glob("store.sqlite*"):
        file.unlink()
    learner.store = RolloutStore(learner.store_path)
    finish_group(learner.store, 0)
    assert learner.run()[0] == 1
    assert "put the run's own store back" in (learner.store.state("learner_error") or "")


def test_groups_that_a_restored_store_does_not_know_as_trained_are_not_trained_again(
    make_learner: MakeLearner,
) -> None:
    learner, engine = make_learner("run")
    assert learner.run()[0] == 0
    with learner.store._write() as db:
        db.execute("UPDATE rollout_groups SET state = 'ready', trained_step = NULL WHERE group_id = 1")
    assert learner.run()[0] == 0
    check(learner, engine, "restored")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_after_a_resume_what_the_same_weights_sampled_is_fresh_and_a_dead_branch_is_as_far_as_it_is(
    make_learner: MakeLearner, max_staleness: int
) -> None:
    """Killed while the checkpoint of step 2 is written: v3 was published, and the run goes on from v2's weights."""
    events = make_learner("whole")[0].run()[1]
    second_save = [index for index, event in enumerate(events) if event == "before save_model"][1]
    learner, engine = make_learner("run", num_groups=0, max_staleness=max_staleness)
    finish_group(learner.store, 0, version=1)
    finish_group(learner.store, 1, version=2)
    code, events = learner.run(kill_at=second_save)
    assert code == -9 and events[-1] == "before save_model" and engine.version == "v3"
    finish_group(learner.store, 2, version=3)  # sampled by weights that nobody has any more
    finish_group(learner.store, 3, version=2)  # by those that the run goes on from, under their old name
    finish_group(learner.store, 4, version=4)  # and under the new one
    finish_group(learner.store, 5, version=5)
    assert learner.run()[0] == 0
    lineage = learner.store.lineage()
    assert engine.published["v2"] == engine.published["v4"] != engine.published["v3"]
    assert [lineage.distance(sampled, 4) for sampled in (1, 2, 3, 4)] == [1, 0, 1, 0]
    lines = [json.loads(line) for line in learner.metrics.read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [2, 5, 6]
    # Step 2 is taken by v4's weights with group 1, of v2. Step 3 by v5's: group 2 is two steps from them, 3 one.
    if max_staleness == 0:
        assert learner.store.fate(3) == ("dropped", "stale") and learner.trained() == {1: [0], 2: [1], 3: [5]}
    else:
        assert learner.store.fate(3) == ("trained", None) and learner.trained() == {1: [0], 2: [1], 3: [3]}
    assert learner.store.fate(2) == ("dropped", "stale")
