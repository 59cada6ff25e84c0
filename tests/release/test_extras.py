"""A base installation: what is missing is told with the command that installs it, and only by who needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes import open_backend
from sandboxes.base import Access, SandboxError
from sandboxes.docker import DockerConfig
from sandboxes.e2b import E2BConfig
from sandboxes.extras import EXTRAS, is_installed

# As in a process where the libraries are not installed: imports fail, and nothing is found.
BLOCKED = "import sys; sys.modules |= dict.fromkeys({names!r})\n"
ALL = {"docker", "e2b", "openreward", "aiohttp", "ray", "submitit", "tensorboard", "trackio", "wandb"}


def without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", BLOCKED.format(names=names) + code]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def test_every_module_of_the_command_line_works_without_any_extra() -> None:
    done = without(
        ALL,
        "from harness_trainer.cli import COMMANDS, main\n"
        "import importlib\n"
        "for name in COMMANDS: importlib.import_module(f'harness_trainer.cli.{name}')\n"
        "assert main(['train', '--dry-run', '--sandbox', 'docker']) == 0\n"
        "import harness_trainer.run, harness_trainer.rollouts.runner\n",
    )
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize(("config", "library"), [(DockerConfig(), "docker"), (E2BConfig(), "e2b")])
def test_a_sandbox_whose_sdk_is_missing(
    config: DockerConfig | E2BConfig, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert not is_installed(library)
    with pytest.raises(SandboxError, match=rf"pip install 'harness-trainer\[{EXTRAS[library]}\]'"):
        open_backend(config, run_id="r", registry=tmp_path, access=Access())


@pytest.mark.parametrize(
    ("library", "extra"),
    [
        ("docker", "docker"),
        ("e2b.api", "e2b"),
        ("openreward", "ors"),
        ("aiohttp", "ors"),
        ("ray", "ray"),
        ("submitit", "slurm"),
    ],
)
def test_a_command_that_meets_a_missing_library_names_its_extra(library: str, extra: str) -> None:
    code = (
        "import sys, types\n"
        "from harness_trainer import cli\n"
        "module = types.ModuleType('harness_trainer.cli.doctor')\n"
        "def run(argv):\n"
        f"    import {library}\n"
        "module.run = run\n"
        "sys.modules['harness_trainer.cli.doctor'] = module\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    done = without({library.partition(".")[0]}, code)
    assert done.returncode == 3, done.stderr[-1500:]
    assert f"is not installed here: pip install 'harness-trainer[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_library_of_no_extra_is_a_bug_and_shows() -> None:
    done = without({"nothing_of_that_name"}, "raise ModuleNotFoundError(name='nothing_of_that_name')\n")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_clean_goes_on_without_the_sdks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_x")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = without({"docker", "e2b"}, "from harness_trainer.cli import main; sys.exit(main(['clean', '--dry-run']))\n")
    assert done.returncode == 0, done.stderr[-1500:]
