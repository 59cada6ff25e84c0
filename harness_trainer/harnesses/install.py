"""Installs agents once into a cache, never per rollout.

Owns the cache's layout, `<cache>/harnesses/<npm|pip>-<hash of what is installed>/`, shared by adapters that need the
same. Safe for several processes at once and after a kill: an npm install has a folder of its own, renamed into place
when its check has passed; a Python environment holds its own path and cannot be renamed: a file says that it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness, NpmInstall, PipInstall, render
from harness_trainer.harnesses.harbor_agent import check_agent
from harness_trainer.side_environments import python_candidates

INSTALL_TIMEOUT_S = 900
_DONE = ".done"
_NODE_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}  # as npm's packages of Node.js call them


def ensure_installed(harness: Harness, cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder with the agent's programs, installed now if it is not in the cache yet.

    Raises SetupError when npm, Harbor or the Python it needs is missing, the install fails, or the program does not
    start, and ConfigError when it is an agent that Harbor does not have.
    """
    if harness.harbor is not None:
        progress(f"asking Harbor for {harness.harbor.agent}")
        check_agent(harness)
    install = harness.install
    if install is None:
        return Path("/usr/bin")
    home = cache / "harnesses" / f"{install.type}-{_key(install)}"
    bin_dir = home / ("node_modules/.bin" if install.type == "npm" else "bin")
    home.parent.mkdir(parents=True, exist_ok=True)
    if _whole(install, home, bin_dir):
        return bin_dir
    with (home.parent / f".{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _whole(install, home, bin_dir):
            return bin_dir
        if install.type == "npm":
            _npm_install(harness.name, install, home, progress)
        else:
            _pip_install(harness.name, install, home, progress)
    return bin_dir


def python_folders(bin_dir: Path) -> list[Path]:
    """What a Python environment made here needs at the very same paths elsewhere: itself and its interpreter's files.

    The system's own interpreter is not among them: a sandbox that is to use one has to have it.
    """
    home = bin_dir.parent
    settings = dict(line.split(" = ", 1) for line in (home / "pyvenv.cfg").read_text().splitlines() if " = " in line)
    base = Path(settings["home"]).parent
    return [home] if base.resolve() in (Path("/"), Path("/usr"), Path("/usr/local")) else [home, base]


def _key(install: NpmInstall | PipInstall) -> str:
    words = list(install.packages) if install.type == "npm" else [install.python, *install.packages]
    if install.type == "npm":
        words += [f"node@{install.node}"] if install.node is not None else []
        words += [f"{name}={value}" for name, value in install.env.items()]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def _whole(install: NpmInstall | PipInstall, home: Path, bin_dir: Path) -> bool:
    if install.type == "npm":
        return bin_dir.is_dir()
    return (home / _DONE).is_file() and (bin_dir / "python").exists()  # its interpreter may have been removed since


def _npm_install(name: str, install: NpmInstall, home: Path, progress: Callable[[str], None]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError(
            f"harness {name} needs npm, which is not on PATH: install Node.js 20 or newer, which brings it "
            "(https://nodejs.org/en/download; Debian 12's own is older), or use --harness pyagent, which needs none"
        )
    packages = list(install.packages)
    if install.node is not None:
        packages.append(f"node-linux-{_NODE_MACHINES.get(platform.machine(), platform.machine())}@{install.node}")
    progress(f"installing {' '.join(packages)} with npm (once)")
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        (work / "package.json").write_text('{"private": true}')
        command = [npm, "install", "--no-audit", "--no-fund", "--no-update-notifier", *packages]
        done = _run(command, work, f"`npm install {' '.join(packages)}`")
        check = [str(work / "node_modules" / ".bin" / install.check[0]), *install.check[1:]]
        if done.returncode == 0:
            if not Path(check[0]).exists():
                raise SetupError(
                    f"installing harness {name} failed: {' '.join(packages)} brings no program {install.check[0]!r}; "
                    "mend install.check or install.packages in its adapter"
                )
            done = _run(check, work, f"{name} after installing", _check_env(install, Path(check[0]).parent))
        if done.returncode != 0:
            tail = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise SetupError(f"installing harness {name} failed: {' '.join(tail) or 'no message'}")
        os.rename(work, home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_env(install: NpmInstall, bin_dir: Path) -> dict[str, str]:
    """As in a sandbox, the agent's own Node.js comes first."""
    path = f"{bin_dir}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    own = {name: str(render(value, {"bin": str(bin_dir)})) for name, value in install.env.items()}
    return {**os.environ, "PATH": path, **own}


def _pip_install(name: str, install: PipInstall, home: Path, progress: Callable[[str], None]) -> None:
    python = _find_python(name, install.python)
    progress(f"installing {' '.join(install.packages)} with pip for Python {install.python} (once)")
    shutil.rmtree(home, ignore_errors=True)  # a cut-off install
    # Isolated: the caller's PYTHONPATH and user site are no part of what is installed.
    python_inside = [str(home / "bin" / "python"), "-I"]
    pip = [*python_inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
    check = [str(home / "bin" / install.check[0]), *install.check[1:]]
    steps = ([python, "-I", "-m", "venv", str(home)], [*pip, *install.packages], check)
    try:
        for step in steps:
            # What a program puts into HOME when it is tried is nothing for this user's.
            with tempfile.TemporaryDirectory(prefix="harness-trainer-check-") as spare:
                env = {**os.environ, "HOME": spare} if step is check else None
                done = _run(step, home.parent, f"`{' '.join(step)}`", env)
            if done.returncode != 0:
                raise SetupError(f"installing harness {name} for Python {install.python} failed: {_why(done)}")
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    (home / _DONE).touch()


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what went wrong: pip's first error, else the last line (its warnings may come after)."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return next(iter(errors or lines[-1:]), f"no message, exit code {done.returncode}")


_ABOUT = """
import ensurepip, os, sys, venv
print(*sys.version_info[:2], sep=".")
print(os.path.realpath(sys.executable))
"""


def _find_python(name: str, minor: str) -> str:
    """An interpreter of that minor version that can make environments: ours, one on PATH, or pyenv's newest.

    Its real path, so that an environment names the folder which has its library.
    """
    rejected = []
    for candidate in python_candidates(minor):
        try:
            asked = _run([candidate, "-I", "-c", _ABOUT], Path("/"), candidate)
        except SetupError as error:
            rejected.append(str(error))
            continue
        version, _, path = asked.stdout.strip().partition("\n")
        if asked.returncode == 0 and version == minor:
            return path
        rejected.append(f"{candidate} {f'is Python {version}' if version else f'does not do ({_why(asked)})'}")
    found = f" ({'; '.join(rejected)[:400]})" if rejected else ""
    raise SetupError(
        f"harness {name} needs Python {minor}, and none that works was found on PATH or in pyenv{found}: install it "
        f"(apt-get install python{minor}-venv, or pyenv install {minor}) and try again"
    )


def _run(
    command: list[str], cwd: Path, what: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            umask=0o022,  # whoever runs agents in a container may be somebody else
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{what} did not end within {INSTALL_TIMEOUT_S} s; check the network and try again") from error
    except OSError as error:
        raise SetupError(f"{what} could not be run: {error}") from error
