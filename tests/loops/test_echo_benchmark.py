"""The echo example's settings for two cores, and what `benchmarks.echo` says of a run. The run itself takes minutes."""

from __future__ import annotations

import yaml

from benchmarks.echo import config, example, verdict
from harness_trainer.cli.train import run


def test_the_goal_is_two_standard_errors_in_ten_minutes():
    low, high = [0.0, 1.0] * 16, [2.0, 3.0] * 16
    line, reached = verdict(low, high, 8.0)
    assert reached and line.startswith("mean reward 0.500 ± 0.090 (first 32 rollouts) to 2.500 ± 0.090")
    assert line.endswith("15.7 standard errors in 8.0 minutes; goal > 2 in < 10: yes")
    assert not verdict(low, high, 10.5)[1] and not verdict(high, low, 8.0)[1] and not verdict(low, low, 8.0)[1]
    assert verdict([0.0, 0.0], [1.0, 1.0], 8.0)[1] and not verdict([1.0, 1.0], [1.0, 1.0], 8.0)[1]


def test_its_settings_are_those_of_the_example_and_the_command_line_takes_them(tmp_path, capsys):
    echo = example()
    measured = config(echo, tmp_path / "rows.jsonl", seed=3, steps=5)
    assert (measured.env.target, measured.learner.max_steps) == (f"{echo.__file__}:EchoEnv", 5)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Echo."}\n')
    argv = ["--env", measured.env.target, "--tasks", str(tmp_path / "rows.jsonl"), *echo.flags(echo.TWO_CORES)]
    argv[1] = f"class:{argv[1]}"
    assert run([*argv, "--learner.max-steps", "5", "--learner.save-steps", "5", "--dry-run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["rollouts"]["group_size"] == echo.TWO_CORES["rollouts"]["group_size"]
    assert resolved["learner"]["max_steps"] == 5, "what is given after them counts"
