"""A part works in the run's folder, and finds what this process finds by PYTHONPATH."""

import json
import sys

import pytest

from harness_trainer.config import RunConfig
from harness_trainer.display import Display
from harness_trainer.run import Supervisor
from harness_trainer.rundir import RunDir


@pytest.mark.parametrize("given", [".", "sub:/opt/x", ":sub", "", None])
def test_relative_entries_mean_the_same_folder_in_a_part(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    code = "import json, os; print(json.dumps(os.environ.get('PYTHONPATH')))"
    part = Supervisor(RunConfig(), run, Display())._spawn("part", [sys.executable, "-c", code])
    assert part.wait(10) == 0
    part.stop()
    wanted = {".": f"{tmp_path}", "sub:/opt/x": f"{tmp_path}/sub:/opt/x", ":sub": f"{tmp_path}:{tmp_path}/sub"}
    assert json.loads((run.logs / "part.log").read_text()) == wanted.get(given, given)
