"""Environments beside the project's own, for what cannot share it: vLLM, mitmproxy, Harbor.

Owns which there are, where an installed package keeps them, and how they are made. A checkout has them at its root,
made by `make setup`; everybody else by `harness-trainer setup`. `announce` tells the rest of the program by the
variables that it reads anyway, so that nobody else knows of this. Called by the command line; `harnesses` asks for
Pythons, too.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_trainer.cache import cache_dir
from harness_trainer.errors import SetupError

DISTRIBUTION = "harness-trainer"
_ROOT = Path(__file__).parents[1]  # of a checkout; of an installed package its site-packages
_TORCH = "torch==2.13.0"
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2]); import ensurepip"

Run = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class SideEnvironment:
    """Example: ENVIRONMENTS["intercept"] has mitmproxy, and is read by the capture proxy."""

    name: str
    about: str
    variable: str  # names its python to the rest of the program
    folder: str  # at a checkout's root
    python: str | None = None  # the version it must have; None = this one's


ENVIRONMENTS = {
    each.name: each
    for each in (
        SideEnvironment("engine", "vLLM", "HARNESS_TRAINER_ENGINE_PYTHON", ".venv-engine"),
        SideEnvironment(
            "intercept", "mitmproxy, for agents without a base URL", "CAPTURE_PROXY_INTERCEPT_PYTHON", ".venv-intercept"
        ),
        SideEnvironment(
            "harbor", "Harbor's agents and environments", "HARNESS_TRAINER_HARBOR_PYTHON", ".venv-harbor", "3.12"
        ),
    )
}


def place(environment: SideEnvironment) -> Path:
    """Where `make` puts it: in the cache, so that an upgrade of the package keeps it."""
    return cache_dir() / "environments" / environment.name


def announce(environ: MutableMapping[str, str]) -> None:
    """Name each environment that was made here, unless a person names another or this is a checkout that has it."""
    for each in ENVIRONMENTS.values():
        python = place(each) / "bin" / "python"
        if each.variable in environ or (_ROOT / each.folder).is_dir():
            continue
        if os.access(python, os.X_OK):
            environ[each.variable] = str(python)


def make(environment: SideEnvironment, *, kind: str, say: Callable[[str], None], run: Run | None = None) -> Path:
    """Make or complete it; its python. `kind`: of the engine, cpu or cuda. Raises SetupError with what failed."""
    run = run or _run
    folder = place(environment)
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        base = _base(environment)
        say(f"making {folder} with {base}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        run([base, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    lock = requirements(f"engine-{kind}.txt" if environment.name == "engine" else f"{environment.name}.txt")
    say(f"installing {lock.name} into it (minutes)")
    if environment.name == "engine" and kind == "cpu":
        run([*pip, _TORCH])  # with its own dependencies, which differ between machines
    run([*pip, "-r", str(lock)] if lock.name == "engine-cuda.txt" else [*pip, "--no-deps", "-r", str(lock)])
    if environment.name == "engine":
        _add_ourselves(python, pip, run)
    return python


def requirements(name: str) -> Path:
    """A lock of ours, in a checkout or as it was installed. Raises SetupError."""
    here = _ROOT / "requirements" / name
    if here.is_file():
        return here
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.match(f"share/{DISTRIBUTION}/requirements/{name}")), None)
    path = None if found is None else Path(str(found.locate()))
    if path is None or not path.is_file():
        raise SetupError(f"{name} was not installed with {DISTRIBUTION}: install its wheel again")
    return path


def _add_ourselves(python: Path, pip: list[str], run: Run) -> None:
    """vLLM imports a plug-in of ours: the same package goes into its environment, and none of its dependencies."""
    if (_ROOT / "pyproject.toml").is_file():
        run([*pip, "--no-deps", "-e", str(_ROOT)])
        return
    asked = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    copy_package(Path(asked.stdout.strip()))


def copy_package(target: Path) -> int:
    """Copy this installation's files, by its own record, to another site-packages; how many they were."""
    count = 0
    for file in importlib.metadata.files(DISTRIBUTION) or []:
        source = Path(str(file.locate()))
        if ".." in file.parts or file.suffix == ".pyc" or not source.is_file():
            continue  # programs and locks lie elsewhere, and are not needed there
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / file)
        count += 1
    return count


def _base(environment: SideEnvironment) -> str:
    """A Python of the version that it must have. Raises SetupError."""
    if environment.python is None:
        return sys.executable
    for found in python_candidates(environment.python):
        asked = subprocess.run([found, "-c", _VERSION], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip() == environment.python:
            return found
    raise SetupError(
        f"{environment.about}: they need a Python {environment.python} with ensurepip, and none that works was found on"
        f" PATH or in pyenv: install it (apt-get install python{environment.python}-venv, or pyenv install"
        f" {environment.python}), or name an environment that has Harbor in {environment.variable}"
    )


def python_candidates(minor: str) -> Iterator[str]:
    """Interpreters that may be of that minor version, unasked: ours, those on PATH, pyenv's from the newest."""
    if minor == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield sys.executable
    seen = set()
    for folder in os.get_exec_path():
        found = shutil.which(f"python{minor}", path=folder)
        if found and found not in seen:
            seen.add(found)
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = [path for path in pyenv.glob(f"{minor}.*/bin/python{minor}") if os.access(path, os.X_OK)]
    yield from map(str, sorted(installed, key=lambda path: _numbers(path.parents[1].name), reverse=True))


def _numbers(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else -1 for part in version.split(".")]  # 3.12.10 is newer than 3.12.9


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SetupError(f"`{' '.join(argv[:4])} ...` failed: {last}; mend that and run the same command again")
