"""The gateway as sandboxes reach it: its addresses on this machine, and the way to it from outside where one is opened.

Owns the joining of `expose` to a run's parts: a tunnel's process is a part like any other, started again when it dies.
Called by the supervisor once the gateway serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from harness_trainer.errors import GatewayFailed
from harness_trainer.expose import ExposeConfig
from harness_trainer.expose.public_way import PACE, Pace, PublicWay
from harness_trainer.rundir import RunDir
from harness_trainer.supervision.parts import Part, Parts
from sandboxes.base import Endpoint
from sandboxes.lifecycle import OwnedProcess, start_process

NAME = "tunnel"
# Of a person's keys, those that no tunnel's program has a use for.
_KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "E2B_API_KEY", "OPENREWARD_API_KEY")


class WayOut:
    """One run's. `endpoint` opens what is to be opened; `close` ends the watching, and the parts end the process."""

    def __init__(
        self,
        config: ExposeConfig,
        public_url: str | None,
        *,
        run: RunDir,
        registry: Path,
        say: Callable[[str], None],
        pace: Pace = PACE,
    ) -> None:
        self._config = config
        self._public_url = public_url
        self._run = run
        self._registry = registry
        self._say = say
        self._pace = pace
        self._way: PublicWay | None = None

    def endpoint(self, agent_url: str, socket: Path | None, parts: Parts) -> Endpoint:
        """Blocking, until the way is proved. Raises ConfigError, SetupError, GatewayFailed, LifecycleError."""
        if self._config.type == "none":
            return Endpoint(agent_url, socket, self._public_url)
        log, file = self._run.logs / f"{NAME}.log", self._run.internal / "public_url"
        way = self._way = PublicWay(
            self._config,
            agent_url=agent_url,
            public_url=self._public_url,
            address_file=file,
            log=log,
            spawn=lambda argv: self._spawn(argv, log),
            say=self._say,
            event=self._run.event,
            pace=self._pace,
        )
        self._say(f"opening the gateway to sandboxes elsewhere ({self._config.type})")
        if way.argv is None:
            way.open()
        else:
            parts.start(Part(NAME, log, GatewayFailed, way.launch, on_death=way.lost, give_up=way.close))
        return Endpoint(agent_url, socket, way.url, file)

    def close(self) -> None:
        if self._way is not None:
            self._way.close()

    def _spawn(self, argv: list[str], log: Path) -> OwnedProcess:
        env = environment(self._config, os.environ)
        return start_process(argv, env=env, cwd=self._run.path, log_path=log, registry=self._registry, kind=NAME)


def environment(config: ExposeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What a tunnel's program gets of a person's variables: never the run's own keys, and other keys only where the
    program is the person's choice (Gradio fetches its own)."""
    withheld = () if config.type == "command" else _KEYS
    return {
        name: value for name, value in environ.items() if not name.startswith("CAPTURE_PROXY_") and name not in withheld
    }
