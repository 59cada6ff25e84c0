"""vLLM in another container: the face of `engine.launch.Engine`, by the command `serve engine` over there.

Owns the order that the host gets and the wait until the engine answers. vLLM's flags, its phases and why it died while
loading are that command's own business; its last line is ours to pass on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.errors import EngineFailed
from harness_trainer.rundir import write_atomically
from harness_trainer.supervision.parts import last_line
from harness_trainer.supervision.process import PartProcess
from harness_trainer.supervision.remote import RemoteHost, RemoteProcess

_POLL_S = 0.25
_MARGIN_S = 30.0  # `serve engine` has the same limit of its own, and says more


class RemoteEngine:
    """`folder` is in the run folder, `log_path` vLLM's log there; what the command itself says lies beside it."""

    def __init__(
        self, host: RemoteHost, config: EngineConfig, *, model: ModelInfo, folder: Path, log_path: Path
    ) -> None:
        self._host = host
        self._config = config
        self._model = model
        self._folder = folder
        self._vllm_log = log_path
        self._log = log_path.with_name("serve-engine.log")
        self._process: RemoteProcess | None = None
        self._cancelled = threading.Event()

    @property
    def process(self) -> PartProcess:
        """Raises EngineFailed before `start` got that far."""
        if self._process is None:
            raise EngineFailed("the engine was not started")
        return self._process

    def start(self, progress: Callable[[str], None] = lambda text: None) -> str:
        """Start, wait until the engine answers, return its URL; blocking. Raises SetupError, EngineFailed."""
        name, port = self._host.address()
        served = self._config.served_name or self._model.model_id
        settings = self._config.model_copy(
            update={"host": "0.0.0.0", "port": port, "served_name": served, "python": None}
        )
        config_file = self._folder / "engine.yaml"  # JSON is YAML
        write_atomically(config_file, settings.model_dump_json(indent=1))
        argv = [sys.executable, "-m", "harness_trainer.cli", "serve", "engine", "--model", str(self._model.path)]
        argv += ["--config", str(config_file), "--log", str(self._vllm_log)]
        url = f"http://{name}:{port}"
        progress("starting in its container")
        self._process = self._host.start(argv, env={}, cwd=self._folder, log_path=self._log, kind="engine")
        try:
            self._wait(self._process, url, served, progress)
        except BaseException:
            self._process.stop(5.0)
            raise
        return url

    def stop(self) -> None:
        self._cancelled.set()
        if self._process is not None:
            self._process.stop(10.0)

    def _wait(self, process: RemoteProcess, url: str, served: str, progress: Callable[[str], None]) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s + _MARGIN_S
        said = ""
        with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
            while not _serves(client, served):
                if not process.alive():
                    why = last_line(self._log).removeprefix("harness-trainer: ")
                    raise EngineFailed(why if "(log: " in why else f"{why} (log: {self._log})")
                if self._cancelled.is_set():
                    raise EngineFailed("the engine was stopped while it started")
                if time.monotonic() > deadline:
                    raise EngineFailed(f"the engine did not answer at {url} in time: see {self._vllm_log}")
                if (line := last_line(self._log)) != said:
                    said = line
                    progress(line)
                time.sleep(_POLL_S)


def _serves(client: httpx.Client, served: str) -> bool:
    try:
        return any(model["id"] == served for model in client.get("/v1/models").json()["data"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
