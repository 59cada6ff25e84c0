"""Rows of a JSONL file as tasks, and a person's class by name: faults are told with the line, or what is there."""

from __future__ import annotations

import json

import pytest

from harness_trainer.environments import OwnConfig, OwnLoopConfig
from harness_trainer.loops import inspect_source, open_source, pin_env
from harness_trainer.loops.base import ROW, EnvironmentFault
from harness_trainer.loops.loading import load_target, pin_target
from harness_trainer.loops.rows import load_rows, prompt_of


def written(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    )
    return path


def test_each_line_is_a_task_with_its_columns(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess.\u2028 Now."}]
    tasks = load_rows(
        written(tmp_path, {"prompt": "Say moon.", "n": 3}, "", {"prompt": chat, "name": "guess"}, {"n": 1})
    )
    assert [task.name for task in tasks] == ["row-00000", "guess", "row-00002"]
    assert [task.instruction for task in tasks] == ["Say moon.", "Guess.\u2028 Now.", ""]
    assert tasks[0].metadata[ROW] == {"prompt": "Say moon.", "n": 3}
    prompts = [prompt_of(task.metadata[ROW]) for task in tasks]
    assert prompts == [[{"role": "user", "content": "Say moon."}], chat, [{"role": "user", "content": ""}]]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no rows"),
        (['{"prompt": '], ":1 is not valid JSON"),
        ([{"prompt": "a"}, "[1]"], ":2 is no object"),
        ([{"prompt": 3}], ":1: prompt must be text, or messages"),
        ([{"prompt": []}], ":1: prompt must be text, or messages"),
        ([{"name": "a"}, {"name": "a"}], "several rows are named 'a'"),
    ],
)
def test_faults_name_the_line(tmp_path, lines, said):
    with pytest.raises(EnvironmentFault, match=said):
        load_rows(written(tmp_path, *lines))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(EnvironmentFault, match="No such file"):
        load_rows(tmp_path / "none.jsonl")


LOOP = """
from beside import WORD

class Moon:
    def run(self, task, model):
        return float(WORD in model.chat([{"role": "user", "content": task.instruction}]).message["content"])

def not_a_loop():
    pass
"""


@pytest.fixture
def loop_file(tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'moon'\n")
    path = tmp_path / "moon_loop.py"
    path.write_text(LOOP)
    return path


async def test_a_loop_is_named_by_its_file_and_class(loop_file, tmp_path, monkeypatch):
    rows = written(tmp_path, {"prompt": "Say moon."})
    monkeypatch.chdir(tmp_path)
    env = pin_env(OwnLoopConfig(target="moon_loop.py:Moon"))
    assert env.target == f"{loop_file}:Moon"
    name, tasks = await inspect_source(env, str(rows))
    assert (name, len(tasks)) == ("Moon", 1)
    assert load_target(env.target) is load_target(env.target), "a file is loaded once"
    assert open_source(OwnLoopConfig(target=env.target, name="other"), str(rows)).name == "other"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{file}:Sun", "there is no 'Sun' in it; it has Moon, not_a_loop"),
        ("{folder}/none.py:Moon", "there is no file"),
        ("no_such_module:Moon", "ModuleNotFoundError"),
        ("Moon", "names nothing that can be imported"),
        ("{folder}/broken.py:Moon", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_told(loop_file, tmp_path, target, said):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(EnvironmentFault, match=said):
        load_target(target.format(file=loop_file, folder=tmp_path))


def test_modules_are_left_as_they_are():
    assert pin_target("package.module:Name") == "package.module:Name"


def test_other_kinds_are_no_source():
    with pytest.raises(EnvironmentFault, match="own"):
        open_source(OwnConfig(), "rows.jsonl")
