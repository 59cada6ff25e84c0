"""examples/white_box/mixed.py: its servers run, and every source that it writes down can be opened."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import yaml

from harness_trainer.config import RunConfig
from harness_trainer.environments import EnvironmentClassConfig, OrsConfig
from harness_trainer.workload import Inspector

EXAMPLE = Path(__file__).parents[2] / "examples" / "white_box" / "mixed.py"


def test_every_source_of_the_example_can_be_opened_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import mixed

    seen = {}

    class Done:
        returncode = 7

    def run(command, *, env, **_):
        seen["command"], seen["echo"] = command, env["ECHO_URL"]
        found = RunConfig(sources=command[command.index("--sources") + 1])
        inspector = Inspector(found, "test", tmp_path / "owned", lambda line: None)
        seen["config"], seen["work"] = found, inspector.inspect()
        return Done

    monkeypatch.setattr(mixed, "subprocess", SimpleNamespace(run=run))
    arguments = ["mixed.py", "--agent", "pyagent", "--file", str(tmp_path / "mixed.yaml"), "--model", "m"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert mixed.main() == 7
    assert seen["command"][:5] == [*mixed.TRAIN, "--sources"]
    assert seen["command"][6:] == ["--model", "m"]
    assert seen["echo"] == mixed.echo.ECHO_URL, "the Space; with --local it is a server here, as in echo.py"
    words, echo, ors = seen["config"].sources
    assert [one.weight for one in (words, echo, ors)] == [2, 2, 1]
    assert isinstance(echo.env, EnvironmentClassConfig) and isinstance(ors.env, OrsConfig)
    assert seen["work"].line == "words: pyagent on 1 tasks; echo on 64 tasks; ors on 8 tasks"
    assert [spec.harness for spec in seen["work"].specs] == ["pyagent", "echo", "ors"], "metrics name white-box ones so"
    assert [one.max_turns for one in (spec.config for spec in seen["work"].specs)] == [8, 4, 4]
    evaluated = seen["work"].only_evaluated().specs
    assert [spec.config.evaluation.tasks for spec in evaluated] == ["twelve-words", str(tmp_path / "mixed.jsonl"), ""]
    assert yaml.safe_load((tmp_path / "mixed.yaml").read_text())[0]["harness"] == "pyagent"


def test_the_example_says_what_it_needs():
    found = re.match(r"# /// script\n(.*?)# ///\n", EXAMPLE.read_text(), re.DOTALL)
    assert found is not None
    said = tomllib.loads("".join(line.removeprefix("# ") for line in found[1].splitlines(keepends=True)))
    assert {"harness-trainer[ors]", "openenv==0.10.0", "uvicorn"} == set(said["dependencies"])
