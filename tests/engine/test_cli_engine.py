"""What `harness-trainer train` says when its engine is not what it must be, and what it leaves behind: nothing."""

import os
import socket
import sys
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from harness_trainer.cli import main

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model", family="llama", tied=True).path


@pytest.fixture
def train(tmp_path, model, monkeypatch, capsys):
    """Run `train` on the fake engine that behaves as told; gives (exit code, the one line)."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HARNESS_TRAINER_ENGINE_PYTHON", str(python))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(behaviour, *arguments):
        monkeypatch.setenv("FAKE_VLLM", behaviour)
        folder = ["--run-dir", str(tmp_path / "run"), "--model", str(model), "--harness", "pyagent-chat"]
        code = main(["train", "--plain", *folder, *arguments])
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("harness-trainer: ")]
        assert len(lines) == 1
        return code, lines[0]

    yield run
    owned = tmp_path / "state" / "harness-trainer" / "owned"
    assert list(owned.glob("*.json")) == [], "nothing may be left on record"
    assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _names(pid, tmp_path)]


def _names(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_an_engine_that_cannot_be_trained_from_is_refused_with_every_missing_flag(train):
    code, line = train("serve")
    assert code == 4
    assert "--enable-scale-out" in line and "VLLM_SERVER_DEV_MODE=1" in line


def test_an_engine_that_dies_while_loading_gives_its_own_reason(train):
    code, line = train("ValueError: FooForCausalLM is not supported")
    assert code == 4
    assert "FooForCausalLM is not supported" in line and "engine.log" in line


def test_a_port_that_is_taken_is_named(train):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = train("serve", "--engine.port", str(port))
    assert code == 3
    assert str(port) in line
