"""An environment for Harbor on the plain `docker` command, as somebody might write one. Imported by Harbor (3.12).

Harbor's own Docker environment needs the compose plugin; this one needs an engine only, and is quick enough for the
conformance suite to run through the bridge.
"""

import asyncio
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode


class PlainDockerEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "plain-docker"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self):
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(f"{self.environment_dir} has no Dockerfile")

    async def _docker(self, *argv, timeout_sec=None):
        process = await asyncio.create_subprocess_exec(
            "docker",
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        return ExecResult(
            stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=process.returncode
        )

    async def _checked(self, *argv):
        result = await self._docker(*argv)
        if result.return_code != 0:
            raise RuntimeError(f"docker {argv[0]} failed: {result.stderr}")
        return result.stdout.strip()

    async def start(self, force_build):
        image = self.task_env_config.docker_image
        if image is None:
            built = await self._docker("build", "-q", "--force-rm", str(self.environment_dir))
            if built.return_code != 0:
                raise SandboxBuildFailedError(f"docker build failed: {built.stderr}")
            image = built.stdout.strip()
        options = ["--init", "--name", self.session_id, "--label", "plain-docker-environment=1"]
        if self.network_policy.network_mode == NetworkMode.NO_NETWORK:
            options += ["--network", "none"]
        if self.task_env_config.memory_mb:
            options += [
                "--memory",
                f"{self.task_env_config.memory_mb}m",
                "--memory-swap",
                f"{self.task_env_config.memory_mb}m",
            ]
        await self._checked("run", "-d", *options, image, "sleep", "infinity")

    async def stop(self, delete):
        await self._docker("rm", "-f", "-v", self.session_id)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        options = [part for name, value in (env or {}).items() for part in ("-e", f"{name}={value}")]
        options += ["-w", cwd] if cwd else []
        user = self._resolve_user(user)
        options += ["-u", str(user)] if user is not None else []
        return await self._docker("exec", *options, self.session_id, "sh", "-c", command, timeout_sec=timeout_sec)

    async def upload_file(self, source_path, target_path):
        await self._checked("cp", str(source_path), f"{self.session_id}:{target_path}")

    async def upload_dir(self, source_dir, target_dir):
        await self._checked("cp", f"{Path(source_dir)}/.", f"{self.session_id}:{target_dir}")

    async def download_file(self, source_path, target_path):
        await self._checked("cp", f"{self.session_id}:{source_path}", str(target_path))

    async def download_dir(self, source_dir, target_dir):
        await self._checked("cp", f"{self.session_id}:{source_dir}/.", str(target_dir))
