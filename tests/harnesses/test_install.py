"""Agents are installed once into a cache, and a machine that cannot install gets told what to do."""

import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.install import ensure_installed, python_folders


def npm_harness(package, check):
    install = {"type": "npm", "packages": [package], "check": check}
    output = {"type": "text"}
    return Harness.model_validate(
        {"name": "h", "dialect": "openai_chat", "install": install, "argv": ["x"], "output": output}
    )


def local_package(tmp_path, script):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "package.json").write_text('{"name": "pkg", "version": "1.0.0", "bin": {"pkg": "run.sh"}}')
    (package / "run.sh").write_text(script)
    (package / "run.sh").chmod(0o755)
    return f"file:{package}"


def test_without_npm_the_error_names_the_command_and_a_harness_that_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"Node.js 20 or newer.*--harness pyagent"):
        ensure_installed(npm_harness("x@1", ["x"]), tmp_path, print)


def test_installs_once_and_then_comes_from_the_cache(tmp_path):
    harness = npm_harness(local_package(tmp_path, "#!/bin/sh\nexit 0\n"), ["pkg"])
    said = []
    first = ensure_installed(harness, tmp_path / "cache", said.append)
    second = ensure_installed(harness, tmp_path / "cache", said.append)
    assert (first / "pkg").exists()
    assert first == second
    assert len(said) == 1


def test_an_install_whose_program_does_not_start_is_not_kept(tmp_path):
    harness = npm_harness(local_package(tmp_path, "#!/bin/sh\necho broken >&2\nexit 3\n"), ["pkg"])
    for _ in range(2):
        with pytest.raises(SetupError, match="broken"):
            ensure_installed(harness, tmp_path / "cache", print)
    left = [p.name for p in (tmp_path / "cache" / "harnesses").iterdir() if not p.name.endswith(".lock")]
    assert left == []


def test_packages_that_do_not_bring_the_program_that_is_to_be_checked_are_not_kept(tmp_path):
    harness = npm_harness(local_package(tmp_path, "#!/bin/sh\nexit 0\n"), ["pgk", "--version"])
    for _ in range(2):
        with pytest.raises(SetupError, match="brings no program 'pgk'; mend install.check"):
            ensure_installed(harness, tmp_path / "cache", print)


# --- Python agents --------------------------------------------------------------------------------------------------

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def pip_harness(package, check=("tool",), python=MINOR):
    install = {"type": "pip", "packages": [str(package)], "check": list(check), "python": python}
    output = {"type": "text"}
    return Harness.model_validate(
        {"name": "h", "dialect": "openai_chat", "install": install, "argv": ["x"], "output": output}
    )


def wheel(folder, program="print('it works')", name="tool"):
    """A package with one program, as a wheel: installing it needs no index and no build tools."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": f"def main():\n    {program}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(inside, text)
    return path


def left_in(cache):
    return [path.name for path in (cache / "harnesses").iterdir() if not path.name.endswith(".lock")]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """(harness, cache, its programs, what was said): a Python agent that three installed at once."""
    folder, said = tmp_path_factory.mktemp("pip"), []
    harness = pip_harness(wheel(folder))
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda _: ensure_installed(harness, folder / "cache", said.append), range(3)))
    assert len(found) == 1
    return harness, folder / "cache", found.pop(), said


def test_a_python_agent_that_several_want_at_once_is_installed_once_and_runs_by_its_own_path(agent):
    harness, cache, bin_dir, said = agent
    assert len(said) == 1
    assert ensure_installed(harness, cache, said.append) == bin_dir
    assert len(said) == 1
    done = subprocess.run([bin_dir / "tool"], capture_output=True, text=True, check=True, env={})
    assert done.stdout == "it works\n"
    assert bin_dir.parent in python_folders(bin_dir)


def test_a_python_install_that_was_cut_off_is_made_anew(agent):
    harness, cache, bin_dir, _ = agent
    (bin_dir.parent / ".done").unlink()
    (bin_dir / "tool").write_text("half")
    ensure_installed(harness, cache, print)
    assert (bin_dir / "tool").read_text() != "half"


def test_a_python_agent_whose_interpreter_was_removed_is_installed_anew(agent, tmp_path):
    harness, cache, bin_dir, _ = agent
    (bin_dir / "python").unlink()
    (bin_dir / "python").symlink_to(tmp_path / "removed")
    ensure_installed(harness, cache, print)
    assert (bin_dir / "python").exists()


def test_a_python_agent_that_does_not_start_is_not_kept_and_has_not_touched_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    mess = "import os, pathlib, sys; pathlib.Path(os.environ['HOME'], 'mess').touch(); sys.exit('broken')"
    with pytest.raises(SetupError, match=f"harness h for Python {MINOR} failed: broken"):
        ensure_installed(pip_harness(wheel(tmp_path, mess)), tmp_path / "cache", print)
    assert left_in(tmp_path / "cache") == []
    assert not (tmp_path / "home" / "mess").exists()


def test_a_python_package_that_cannot_be_had_is_told_by_pips_own_error_not_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SetupError, match=r"ERROR: .*absent-package==1"):
        ensure_installed(pip_harness("absent-package==1"), tmp_path / "cache", print)
    assert left_in(tmp_path / "cache") == []


def test_a_missing_python_is_named_with_what_was_found_in_its_place(tmp_path, monkeypatch):
    fake = tmp_path / "python3.99"
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(SetupError, match=rf"needs Python 3\.99.*python3\.99 is Python {MINOR}.*pyenv install 3\.99"):
        ensure_installed(pip_harness("x", python="3.99"), tmp_path / "cache", print)


def test_pyenvs_newest_of_the_minor_version_is_asked_and_what_does_not_work_passed_over(tmp_path, monkeypatch):
    for version, script in {"3.99.9": "exit 0", "3.99.10": "echo newest is broken >&2; exit 1"}.items():
        program = tmp_path / "versions" / version / "bin" / "python3.99"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(SetupError, match=r"3\.99\.10/bin/python3\.99 does not do \(newest is broken\).*3\.99\.9/bin"):
        ensure_installed(pip_harness("x", python="3.99"), tmp_path / "cache", print)
