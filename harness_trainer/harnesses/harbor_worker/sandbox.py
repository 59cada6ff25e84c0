"""The sandbox of a rollout, as Harbor sees it: one of its environments, which is ours. Made by `rollout`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from .agent import Order
from .peer import Peer


class Sandbox(BaseEnvironment):  # type: ignore[misc] # Harbor is not in this environment
    """Asks the other side for everything. It is started before us and ends after us."""

    def __init__(self, peer: Peer, order: Order) -> None:
        self._peer = peer
        folder = Path(order["folder"])
        paths = TrialPaths(folder)
        paths.agent_dir.mkdir(parents=True, exist_ok=True)
        mode = NetworkMode.PUBLIC if order["public"] else NetworkMode.NO_NETWORK
        super().__init__(
            environment_dir=folder,
            environment_name=order["task"],
            session_id=order["rollout"],
            trial_paths=paths,
            task_env_config=EnvironmentConfig(workdir=order["workdir"]),
            logger=logging.getLogger("harbor"),
            persistent_env=dict(order["sandbox_env"]),
            network_policy=NetworkPolicy(network_mode=mode),
        )

    @staticmethod
    def type() -> str:
        return "harness-trainer"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, network_allowlist=True)

    def _validate_definition(self) -> None:
        """There is no definition: the sandbox is there."""

    async def start(self, force_build: bool) -> None:
        """It is started."""

    async def stop(self, delete: bool) -> None:
        """It is not ours to stop."""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        as_user = self._resolve_user(user)
        ran = await self._peer.call(
            "exec",
            command=command,
            cwd=cwd,
            env=self._merge_env(env) or {},
            timeout_s=timeout_sec,
            user=None if as_user is None else str(as_user),
        )
        if ran["timed_out"]:  # as Harbor's own environments say it
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=ran["out"], stderr=ran["err"], return_code=ran["code"])

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._peer.call("upload_file", source=_absolute(source_path), target=str(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._peer.call("upload_dir", source=_absolute(source_dir), target=str(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._peer.call("download_file", source=str(source_path), target=_absolute(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._peer.call("download_dir", source=str(source_dir), target=_absolute(target_dir))


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)
