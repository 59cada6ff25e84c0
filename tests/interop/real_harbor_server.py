"""The real `openenv harbor serve` on the real Harbor, in Harbor's Python: `real_harbor_server.py PORT DATASET...`

One thing is ours: what Harbor runs as its Docker environment is a bubblewrap box, which needs no engine and no image.
Everything else is the product: the command, the server, the probe, Harbor's trial, its agent and its verifier.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.factory import _ENVIRONMENT_REGISTRY, _EnvEntry
from harbor.models.environment_type import EnvironmentType

SYSTEM = [path for name in ("usr", "bin", "lib", "lib64", "sbin", "etc") if (path := Path("/", name)).is_dir()]
LINKS = {path.name: os.readlink(path) for path in SYSTEM if path.is_symlink()}
FOLDERS = [path.name for path in SYSTEM if not path.is_symlink()]


class BubblewrapEnvironment(BaseEnvironment):
    """A root of its own with this machine's programs, its network and its processes: no boundary."""

    _root: Path | None = None

    @staticmethod
    def type():
        return EnvironmentType.DOCKER

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self._root = Path(tempfile.mkdtemp(prefix="harbor-box-", dir=os.environ["OPENENV_HARBOR_TRIALS_DIR"]))
        for folder in ("app", "tmp", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "root"):
            (self._root / folder).mkdir(parents=True)
        for name, target in LINKS.items():
            (self._root / name).symlink_to(target)

    async def stop(self, delete):
        if self._root is not None:
            await self.exec(
                "tmux kill-server", timeout_sec=5
            )  # an agent's terminal outlives the command that opened it
            shutil.rmtree(self._root, ignore_errors=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        argv = ["bwrap", "--bind", str(self._root), "/"]
        for name in FOLDERS:
            argv += ["--ro-bind", f"/{name}", f"/{name}"]
        argv += ["--dev", "/dev", "--proc", "/proc", "--chdir", cwd or "/app", "--clearenv"]
        inside = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "TERM": "xterm", "LANG": "C.UTF-8"}
        for name, value in {**inside, **(self._merge_env(env) or {})}.items():
            argv += ["--setenv", name, str(value)]
        process = await asyncio.create_subprocess_exec(
            *argv, "sh", "-c", command, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        return ExecResult(
            stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=process.returncode
        )

    def _inside(self, path):
        return self._root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy2(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)


def main():
    from openenv.cli.commands.harbor import app

    port, datasets = int(sys.argv[1]), sys.argv[2:]
    _ENVIRONMENT_REGISTRY[EnvironmentType.DOCKER] = _EnvEntry("real_harbor_server", "BubblewrapEnvironment", None)
    served = [part for dataset in datasets for part in ("--dataset", dataset)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--capture-port", str(port + 1), "--expose", "direct"]
    app(["serve", *where, *served])


if __name__ == "__main__":
    main()
