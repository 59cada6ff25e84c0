"""Environments beside the project's own: where they are, what they are made of, who is told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness_trainer import side_environments
from harness_trainer.errors import SetupError
from harness_trainer.side_environments import ENVIRONMENTS, announce, copy_package, make, place, requirements


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TRAINER_CACHE", str(tmp_path / "cache"))


def installed(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """As if this were no checkout."""
    monkeypatch.setattr(side_environments, "_ROOT", root)


def have(name: str) -> Path:
    python = place(ENVIRONMENTS[name]) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def test_the_variables_name_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path)
    made = have("intercept")
    have("engine")
    environ = {"HARNESS_TRAINER_ENGINE_PYTHON": "/mine"}
    announce(environ)
    assert environ == {"HARNESS_TRAINER_ENGINE_PYTHON": "/mine", "CAPTURE_PROXY_INTERCEPT_PYTHON": str(made)}


def test_a_checkouts_own_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path)
    have("engine")
    (tmp_path / ".venv-engine").mkdir()
    environ: dict[str, str] = {}
    announce(environ)
    assert environ == {}


def test_the_readers_of_the_variables_have_the_same_names() -> None:
    from capture_proxy.intercept.launch import PYTHON_VARIABLE as intercept
    from harness_trainer.engine.config import PYTHON_VARIABLE as engine
    from sandboxes.harbor import PYTHON_VARIABLE as harbor

    named = {name: each.variable for name, each in ENVIRONMENTS.items()}
    assert named == {"engine": engine, "intercept": intercept, "harbor": harbor}


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        ("intercept", "cpu", [["--no-deps", "-r", "intercept.txt"]]),
        ("engine", "cpu", [["torch==2.13.0"], ["--no-deps", "-r", "engine-cpu.txt"], ["--no-deps", "-e"]]),
        ("engine", "cuda", [["-r", "engine-cuda.txt"], ["--no-deps", "-e"]]),
    ],
)
def test_what_an_environment_is_made_of(name: str, kind: str, steps: list[list[str]]) -> None:
    ran: list[Sequence[str]] = []
    said: list[str] = []
    python = make(ENVIRONMENTS[name], kind=kind, say=said.append, run=ran.append)
    assert ran[0][1:3] == ["-m", "venv"]
    after = [[Path(word).name for word in argv[argv.index("install") + 3 :]] for argv in ran[1:]]
    assert [words[: len(step)] for words, step in zip(after, steps, strict=True)] == steps
    assert python.parts[-2:] == ("bin", "python") and any(str(python.parents[1]) in line for line in said)


def test_harbor_needs_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    ran: list[Sequence[str]] = []
    with pytest.raises(SetupError, match=r"need a Python 3\.12.*HARNESS_TRAINER_HARBOR_PYTHON"):
        make(ENVIRONMENTS["harbor"], kind="cpu", say=lambda text: None, run=ran.append)
    # One on PATH that does not work, as pyenv's stand-in for a version that is not switched on, and pyenv's own.
    own = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python3.12"
    own.parent.mkdir(parents=True)
    for python, script in ((tmp_path / "python3.12", "exit 127"), (own, "echo 3.12")):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    make(ENVIRONMENTS["harbor"], kind="cpu", say=lambda text: None, run=ran.append)
    assert ran[0][0] == str(own)


def test_a_step_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="failed: out of disk"):
        side_environments._run([sys.executable, "-c", "import sys; sys.exit('first\\nout of disk')"])


def test_a_lock_that_was_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements("harbor.txt").is_file()
    installed(monkeypatch, tmp_path)
    with pytest.raises(SetupError, match="install its wheel again"):
        requirements("no-such.txt")


def test_the_package_is_copied_by_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PathDistribution

    site = tmp_path / "site"
    info = site / "thing-1.dist-info"
    info.mkdir(parents=True)
    (site / "thing").mkdir()
    (site / "thing" / "__init__.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Name: thing\nVersion: 1\n")
    (info / "RECORD").write_text("thing/__init__.py,,\n../bin/thing,,\nthing/a.pyc,,\nthing-1.dist-info/METADATA,,\n")
    monkeypatch.setattr(side_environments.importlib.metadata, "files", lambda name: PathDistribution(info).files)
    assert copy_package(tmp_path / "target") == 2
    assert (tmp_path / "target" / "thing" / "__init__.py").read_text() == "x = 1\n"
