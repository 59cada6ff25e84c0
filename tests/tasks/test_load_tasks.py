"""Reading tasks: what is accepted, and what a person is told when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_trainer.errors import TaskError
from harness_trainer.tasks import Task, load_task, load_tasks, resolve_env
from sandboxes.base import BoxSpec, Limits, Network, NetworkMode

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(
        name: str = "hello",
        toml: str | bytes | None = "[metadata]\n",
        instruction: str | None = "Say hello.",
        test: str | None = "true",
    ) -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        if toml is not None:
            (folder / "task.toml").write_bytes(toml if isinstance(toml, bytes) else toml.encode())
        if instruction is not None:
            (folder / "instruction.md").write_text(instruction)
        if test is not None:
            (folder / "tests" / "test.sh").write_text(test)
        return folder

    return make


def test_a_harbor_task_is_read_whole(make: Make) -> None:
    folder = make(
        toml="""
schema_version = "1.4"
[task]
name = "acme/hello"
[metadata]
difficulty = "easy"
reward_range = [-1, 2]
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 4.5
[verifier.env]
KEY = "${KEY}"
[environment]
cpus = 2
allow_internet = false
[environment.env]
A = "b"
"""
    )
    task = load_task(folder)
    assert task == Task(
        name="acme/hello",
        path=folder,
        instruction="Say hello.",
        tests_dir=folder / "tests",
        box=BoxSpec("acme/hello", env={"A": "b"}, limits=Limits(cpus=2)),
        agent_timeout_s=30.0,
        verifier_timeout_s=4.5,
        verifier_network=Network(NetworkMode.NONE),
        env_vars={"KEY": "${KEY}"},
        metadata={"difficulty": "easy", "reward_range": [-1, 2]},
        reward_range=(-1.0, 2.0),
        findings=task.findings,
        raw=task.raw,
    )
    assert task.raw["schema_version"] == "1.4"


def test_an_empty_task_toml_is_enough(make: Make) -> None:
    task = load_task(make(toml=""))
    assert (task.name, task.agent_timeout_s, task.verifier_timeout_s) == ("hello", 600.0, 600.0)
    assert task.reward_range == (0.0, 1.0)


def test_canary_lines_are_not_shown_to_the_agent(make: Make) -> None:
    text = "<!-- harbor-canary GUID 1 -->\n# CANARY do not train\n\nSay hello.\n# canary stays here\n"
    assert load_task(make(instruction=text)).instruction == "Say hello.\n# canary stays here"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"toml": None}, ["task.toml", "missing"]),
        ({"toml": b"\xff\xfe"}, ["task.toml", "cannot be read"]),
        ({"toml": "[metadata"}, ["task.toml", "not valid TOML"]),
        ({"toml": "agent = 3"}, ["task.toml", "`agent` must be a table", "3"]),
        ({"toml": "[agent]\ntimeout_sec = '30'"}, ["`agent.timeout_sec`", "seconds", "'30'"]),
        ({"toml": "[agent]\ntimeout_sec = true"}, ["`agent.timeout_sec`", "True"]),
        ({"toml": "[verifier]\ntimeout_sec = 0"}, ["`verifier.timeout_sec`", "above 0"]),
        ({"toml": "[verifier]\ntimeout_sec = nan"}, ["`verifier.timeout_sec`", "nan"]),
        ({"toml": "[verifier.env]\nA = 1"}, ["`verifier.env.A`", "quotes"]),
        ({"toml": "metadata = []"}, ["`metadata` must be a table"]),
        ({"toml": "[metadata]\nreward_range = [1, 0]"}, ["`metadata.reward_range`", "rising"]),
        ({"toml": "[metadata]\nreward_range = [0, inf]"}, ["`metadata.reward_range`"]),
        ({"toml": "[metadata]\nreward_range = 1"}, ["`metadata.reward_range`"]),
        ({"toml": "[task]\nname = ''"}, ["`task.name`", "not empty"]),
        ({"toml": "[[steps]]\nname = 'one'"}, ["[[steps]]", "not supported"]),
        ({"toml": "[environment]\nos = 'windows'"}, ["`environment.os`", "linux"]),
        ({"instruction": None}, ["instruction.md", "missing"]),
        ({"instruction": " \n"}, ["instruction.md", "empty"]),
        ({"test": None}, ["tests/test.sh", "missing", "reward.txt"]),
    ],
)
def test_a_task_that_cannot_be_used_is_explained_in_one_line(
    make: Make, parts: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(make(**parts))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "hello" in message


def test_a_folder_of_tasks_is_sorted_and_other_folders_are_passed_over(make: Make) -> None:
    for name in ("b", "a", "c"):
        make(name)
    tasks = make("a2").parent
    (tasks / "__pycache__").mkdir()
    (tasks / "README.md").write_text("about")
    assert [t.name for t in load_tasks(tasks)] == ["a", "a2", "b", "c"]
    assert [t.name for t in load_tasks(f"{tasks / 'c'}, {tasks / 'a'}")] == ["c", "a"]
    assert [t.name for t in load_tasks(str(tasks / "b"))] == ["b"]


def test_a_broken_task_among_good_ones_is_not_skipped(make: Make) -> None:
    make("a")
    folder = make("b", toml=None).parent
    with pytest.raises(TaskError, match=r"b.task\.toml is missing"):
        load_tasks(folder)


def test_names_must_be_unique(make: Make) -> None:
    folder = make("a", toml="[task]\nname = 'x/y'").parent
    make("b", toml="[task]\nname = 'x/y'")
    with pytest.raises(TaskError, match=r"two tasks are called 'x/y'.*rename one"):
        load_tasks(folder)


@pytest.mark.parametrize("spec", ["no-such-thing", "examples,nope", "./short-reply", "/dev/null/x"])
def test_an_unknown_spec_says_what_was_tried(spec: str) -> None:
    with pytest.raises(TaskError, match=r"no folder, no file, not `examples` and no example task \(bullet-list, "):
        load_tasks(spec)


def test_a_missing_path_of_two_parts_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"no tasks at 'tasks/nope': it is no folder"):
        load_tasks("tasks/nope")


@pytest.mark.parametrize("spec", ["", " , "])
def test_an_empty_spec_says_what_to_give(spec: str) -> None:
    with pytest.raises(TaskError):
        load_tasks(spec)


def test_a_folder_without_tasks_says_what_one_looks_like(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"holds no task; a task folder has task\.toml"):
        load_tasks(tmp_path)


def test_examples_are_found_from_anywhere_also_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()  # as in a clone of the repository
    monkeypatch.chdir(tmp_path)
    assert len(load_tasks("examples")) >= 8
    assert [t.name for t in load_tasks("short-reply,cheer")] == ["short-reply", "cheer"]


def test_a_jsonl_file_is_the_small_form(tmp_path: Path) -> None:
    (tmp_path / "check.sh").write_text("echo from file")
    lines = [
        {"name": "a", "instruction": "Do a.", "verify": "echo 1 > reward.txt", "metadata": {"reward_range": [0, 5]}},
        {"name": "b", "instruction": "Do b.", "verify": "check.sh", "verifier_timeout_sec": 3, "env": {"X": "y"}},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    first, second = load_tasks(path)
    assert (first.verify_script, first.reward_range, first.tests_dir) == ("echo 1 > reward.txt", (0.0, 5.0), None)
    assert (second.verify_script, second.verifier_timeout_s, second.env_vars) == ("echo from file", 3.0, {"X": "y"})
    assert second.raw == lines[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["tasks.jsonl:1", "not valid JSON"]),
        ("[1]", ["tasks.jsonl:1", "not an object"]),
        ('{"name": "a", "instruction": "x"}', ["`verify`", "None"]),
        ('{"name": 3, "instruction": "x", "verify": "true"}', ["`name`", "3"]),
        ('{"name": "a", "instruction": "x", "verify": "gone.sh"}', ["gone.sh is missing", "tasks.jsonl:1"]),
        ('{"name": "a", "instruction": "x", "verify": "v", "agent_timeout_sec": -1}', ["`agent_timeout_sec`"]),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text(line)
    with pytest.raises(TaskError) as caught:
        load_tasks(tmp_path / "tasks.jsonl")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_verifier_variables_are_resolved_as_harbor_does() -> None:
    env = {"A": "${HOST}", "B": "${MISSING:-fallback}", "C": "as is", "D": "${EMPTY:-}", "E": "x${HOST}"}
    task = Task("t", Path("t"), "do", verify_script="true", env_vars=env)
    assert resolve_env(task, {"HOST": "h"}) == {"A": "h", "B": "fallback", "C": "as is", "D": "", "E": "x${HOST}"}
    with pytest.raises(TaskError, match=r"'t'.*export HOST="):
        resolve_env(task, {})


def test_a_variable_that_is_missing_is_found_before_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(toml='[verifier.env]\nKEY = "${JUDGE_KEY}"')
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(TaskError, match="export JUDGE_KEY="):
        load_tasks(folder)
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert load_tasks(folder)[0].env_vars == {"KEY": "${JUDGE_KEY}"}  # the secret itself is not kept in the task
