"""Checks of what a run consists of: something to start an engine and a gateway with, and their ports."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness_trainer.config import RunConfig
from harness_trainer.doctor.base import Check
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.replicas import port_of, settings_of
from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.learner.launch import num_gpus_here
from harness_trainer.supervision.remote import RemoteHost
from harness_trainer.supervision.replicas import require_one_in_containers

_HEADERS = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
_ANSWER_S = 10.0  # Compose starts the trainer when the others are healthy


def engine(config: RunConfig | None) -> Check:
    host = RemoteHost.find("engine")
    if host is not None:
        try:
            require_one_in_containers(config.engine.replicas if config else 1)
        except SetupError as error:
            return Check("container of the engine", False, "it holds one replica", str(error))
        return _container("engine", host)
    try:
        environment = find_environment(config.engine if config else EngineConfig())
    except SetupError as error:
        return Check("engine environment with vLLM", False, "none", str(error))
    if config is not None:
        try:
            settings_of(config.engine, environment.kind, num_learner_gpus=num_gpus_here(config.learner))
        except (SetupError, ConfigError) as error:
            return Check("GPUs for the engine's replicas", False, "too few", str(error))
    found = f"{environment.kind} build, {environment.python}"
    if environment.kind == "cpu" and (missing := _missing_for_cpu(environment.python)):
        return Check("engine environment with vLLM", False, f"{found}, without {missing[0]}", missing[1])
    return Check("engine environment with vLLM", True, found)


def _missing_for_cpu(python: Path) -> tuple[str, str] | None:
    """What vLLM's build for CPUs needs of the system, and finds out only when it loads, or at the first reply."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return "libnuma.so.1", "apt-get install libnuma1"
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return None
    if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "g++"))):
        return "a C++ compiler", "apt-get install g++, or set TORCHDYNAMO_DISABLE=1"
    asked = subprocess.run([python, "-c", _HEADERS], capture_output=True, text=True, check=False)
    if asked.stdout.strip() == "False":  # Debian has them in a package of their own; what is compiled includes them
        return "Python's headers", "apt-get install python3-dev (of that Python), or set TORCHDYNAMO_DISABLE=1"
    return None


def gateway() -> Iterator[Check]:
    host = RemoteHost.find("gateway")
    if host is not None:
        yield _container("gateway", host)


def ports(config: RunConfig) -> Iterator[Check]:
    """Those that the run names and that are this machine's."""
    if RemoteHost.find("engine") is not None:
        return
    for name, host, port in (("engine", config.engine.host, config.engine.port), ("gateway", "", config.gateway.port)):
        for replica in range(config.engine.replicas if port else 0):
            yield port_is_free(name, host or "127.0.0.1", port_of(port, replica))


def port_is_free(name: str, host: str, port: int) -> Check:
    title = f"port {port} for the {name}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        fix = f"end what listens there (`ss -ltnp 'sport = :{port}'`), or give --{name}.port 0 for a free one"
        return Check(title, False, f"{error.strerror or error}", fix)
    return Check(title, True, "free")


def _container(name: str, host: RemoteHost) -> Check:
    try:
        address = ":".join(map(str, host.address(_ANSWER_S)))
    except SetupError as error:
        return Check(f"container of the {name}", False, "it does not answer", str(error))
    return Check(f"container of the {name}", True, f"waits for orders; to listen at {address}")
