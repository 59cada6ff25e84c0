"""The example tasks: an empty workspace scores 0, a perfect one 1, and weak answers lie between."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness_trainer.rewards.oracle import run_solution
from harness_trainer.rewards.verifier import verify
from harness_trainer.tasks import Task, load_tasks, resolve_box
from sandboxes import open_backend
from sandboxes.base import Access, Backend, Command
from sandboxes.local import LocalConfig

TASKS = {task.name: task for task in load_tasks("examples")}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    config = LocalConfig(root=tmp_path / "root")
    async with open_backend(config, run_id="test", registry=tmp_path / "owned", access=Access()) as opened:
        yield opened


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
async def test_nothing_scores_0_and_the_solution_scores_1(backend: Backend, task: Task) -> None:
    async with backend.sandbox(resolve_box(task)) as box:
        assert (await verify(task, box, backend=backend, final_message=None)).reward == 0.0
        solved = await run_solution(task, box)
        assert solved.exit_code == 0, solved.stderr
        result = await verify(task, box, backend=backend, final_message="something else entirely")
        assert result.reward == 1.0, result
        answer = await box.get_text("/app/answer.txt")
        await box.run(Command(["rm", "answer.txt"]))
        # said instead of written
        assert (await verify(task, box, backend=backend, final_message=answer)).reward == 1.0


# Each list rises strictly: a better answer gives more, so that a weak model has a slope to climb.
LADDERS = {
    "bullet-list": ["Fruits.", "apple\npear\nfig", "- apple\n- pear", "- apple\n- pear\n- fig\n- plum"],
    "cheer": [
        "Go team. You are great. We win.",
        "Go team! You are the best. We will win!",
        "Go! We win it! And we shall never ever be beaten again!",
    ],
    "count-up": ["Sure: one, 2", "1 2 3", "Here: 1 2 3 4 5 6 7", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"],
    "json-object": [
        "Here is the name",
        '{name: "A"}',
        '{"name": 1, "age": 2}',
        '{"name": 1, "age": 2, "city": 3, "x": 4}',
    ],
    "lower-case": [
        "THE MOON IS BRIGHT TONIGHT",
        "The Moon is very bright tonight.",
        "The moon is very bright tonight.",
    ],
    "no-repeats": ["a tree a tree a tree a tree a tree", "a tree and a bush and a bird and a fox and a bee and a log"],
    "short-reply": ["sea", "The sea is nice.", "The sea is nice and blue and calm today."],
    "three-lines": ["rain", "Rain falls on the roof tonight", "Rain falls on my roof\nAnd the garden drinks it"],
    "twelve-words": ["cat", "A cat is a small animal", "A cat is a small and furry animal that purrs"],
    "without-e": ["The seven eager beagles were never there", "A dog is the best friend of every man alive"],
    "word-list": [
        "The river is nice",
        "The river is green in this light",
        "A bird on a boat: green river, wind and stone",
    ],
}


def score_directly(task: Task, text: str, root: Path) -> float:
    """What the task's score.py gives, without a sandbox."""
    (root / "logs" / "agent").mkdir(parents=True, exist_ok=True)
    (root / "logs" / "verifier").mkdir(exist_ok=True)
    (root / "logs" / "agent" / "final_message.txt").write_text(text)
    argv = [sys.executable, "-I", str(task.path / "tests" / "score.py")]
    subprocess.run(argv, env={"SANDBOX_ROOT": str(root)}, check=True, stdout=subprocess.DEVNULL)
    return float((root / "logs" / "verifier" / "reward.txt").read_text())


@pytest.mark.parametrize("name", TASKS)
def test_better_answers_score_strictly_more(tmp_path: Path, name: str) -> None:
    rewards = [score_directly(TASKS[name], text, tmp_path) for text in LADDERS[name]]
    assert rewards == sorted(set(rewards)), rewards
    assert rewards[0] >= 0 and rewards[-1] < 1, rewards
    assert score_directly(TASKS[name], " \n\t ", tmp_path) == 0


def test_there_are_enough_of_them_and_each_is_short_to_read() -> None:
    assert len(TASKS) >= 8 and set(TASKS) == set(LADDERS)
    assert all(
        len(task.instruction) < 150 and (task.path / "environment" / "Dockerfile").is_file() for task in TASKS.values()
    )
