"""What a release must be: one version, a wheel that holds its data, extras that say how they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from harness_trainer.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {"docker", "e2b", "mitm", "ors", "harbor", "view", "ray", "slurm", "all"}
PACKAGES = ("capture_proxy", "harness_trainer", "jobs", "sandboxes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built by the backend itself, from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("release")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next((folder / "dist").glob("*.whl"))) as archive:
        yield archive


def test_the_changelog_begins_with_the_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest.group(1) == PROJECT["project"]["version"]


def test_the_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"harness-trainer {PROJECT['project']['version']}\n"


def test_the_wheel_holds_everything_that_is_read_at_run_time(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        read = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        missing = {str(path.relative_to(ROOT)) for path in read} - names
        assert not missing
    assert {Path(name).name for name in names if "/share/harness-trainer/requirements/" in name} == {
        path.name for path in (ROOT / "requirements").glob("*.txt")
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_the_metadata_is_complete(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    for field in ("Name", "Version", "Summary", "Author", "Keywords", "License-Expression", "Requires-Python"):
        assert metadata[field], field
    assert metadata["Version"] == PROJECT["project"]["version"]
    assert metadata["Description-Content-Type"] == "text/markdown" and len(str(metadata.get_payload())) > 1000
    assert set(metadata.get_all("Provides-Extra") or []) >= EXTRAS
    # A classifier that is not in the index's list, or one beside a licence expression, would refuse the upload.
    assert not [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]


def test_all_is_every_extra_that_a_run_may_need() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) >= EXTRAS
    (everything,) = extras["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    assert named == set(extras) - {"all", "dev", "examples"}


def test_the_lock_holds_the_releases_that_are_declared() -> None:
    locks = [(ROOT / f"requirements/{name}.txt").read_text().split() for name in ("project", "tools")]
    lock = dict(line.split("==") for lines in locks for line in lines)
    lock = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lock.items()}
    project = PROJECT["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "trackers" for line in lines]
    for line in [*project["dependencies"], *extras]:
        name, pinned, version = line.partition("==")
        if pinned and name != "torch":  # its build differs between machines, so it stands before the lock
            assert lock[re.sub(r"[-_.]+", "-", name).lower()] == version, line


def test_what_only_developers_need_is_in_a_lock_that_no_image_gets() -> None:
    locks = {name: (ROOT / f"requirements/{name}.txt").read_text().split() for name in ("project", "tools")}
    names = {lock: {line.partition("==")[0] for line in lines} for lock, lines in locks.items()}
    assert {"pytest", "mypy", "ruff", "hypothesis"} <= names["tools"] and not names["tools"] & names["project"]
    assert not [file for file in (ROOT / "docker").glob("*.Dockerfile") if "tools.txt" in file.read_text()]
