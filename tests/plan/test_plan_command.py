"""`harness-trainer plan`: the arguments of `train`, a price list, and what bad input gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness_trainer.cli import main
from harness_trainer.errors import ConfigError
from harness_trainer.plan.prices import read_prices
from harness_trainer.plan.sizes import GIB, find_gpu, gib, parse_bytes
from tests.plan.conftest import LLAMA, folder_of


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(folder_of(tmp_path / "model", LLAMA))


def test_it_takes_what_train_takes_and_ends_with_the_verdict(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}\nlearner: {{groups_per_step: 3}}\n")
    prices = tmp_path / "prices.yaml"
    prices.write_text("flavors: {box: {gpu: h200, gpus: 2, per_hour: 10}}\n")
    argv = ["plan", "--config", str(file), "--rollouts.group-size", "2", "--gpu", "h200", "--prices", str(prices)]
    assert main([*argv, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is True and said["hours"] > 0 and said["costs"][0]["total"] > 0
    assert said["numbers"]["turns"]["source"] == "assumed"
    assert main([*argv, "--gpu-memory", "1GiB", "--agent-s", "12"]) == 1
    text = capsys.readouterr().out
    assert "Fits: NO" in text and "12 s        given" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpu", "abacus"], "not in the table, choose from t4"),
        (["--gpu-memory", "much"], "no amount of memory"),
        (["--agent-s", "-1"], "--agent-s '-1': give a number above 0"),
        (["--kept", "1.5"], "at most 1"),
        (["--from-run", "/nowhere"], "--from-run takes the folder of a run"),
        (["--prices", "/nowhere.yaml"], "--prices /nowhere.yaml: No such file"),
        (["--rollouts.group-size", "1"], "rollouts.group_size"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) in (2, 5)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flavors: [", "not valid YAML"),
        ("flavors: {a: {gpus: 1, per_hour: 1}}", "give either gpu or gpu_memory"),
        ("flavors: {a: {gpu: abacus, per_hour: 1}}", "not in the table"),
        ("flavors: {a: {gpu_memory: lots, per_hour: 1}}", "no amount of memory"),
        ("flavors: {a: {gpu: h100, per_hour: 0}}", "greater than 0"),
        ("prices: 1", "docs/plan.md"),
    ],
)
def test_a_price_list_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prices(path)


def test_amounts_of_memory() -> None:
    assert parse_bytes("80GiB") == 80 * GIB and parse_bytes("1.5 GB") == 1_500_000_000 and parse_bytes("7") == 7
    assert gib(None) == "unknown" and gib(GIB) == "1.00 GiB"
    assert find_gpu("H100").name == "h100"


def test_the_check_against_a_real_run_goes_through_everything(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    argv = [sys.executable, "-m", "benchmarks.plan_check", "--quick", "--out", str(out)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = json.loads(out.read_text())["lines"]
    assert lines[0]["what"] == "learner's memory, GiB" and len(lines) == 3
    assert all(line["predicted"] > 0 and line["measured"] > 0 for line in lines)
    # A tiny model, so nearly all of it is the process: this holds the accounting of that, and of nothing else.
    assert lines[0]["predicted"] == pytest.approx(lines[0]["measured"], rel=0.5)
