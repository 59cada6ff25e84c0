"""Checks of the Docker engine: whether it answers, runs the images' architecture, and can give GPUs to containers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from harness_trainer.config import RunConfig
from harness_trainer.doctor.base import Check
from sandboxes.docker import DockerConfig

_NAME = "Docker engine, for --sandbox docker"
# As images name architectures, and as kernels do.
_KERNELS = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


def engine(*, wanted: bool, config: RunConfig | None = None) -> list[Check]:
    """`wanted` = the run's sandboxes are in it."""
    from sandboxes.docker_labels import engine_address
    from sandboxes.extras import install_command, is_installed

    if not is_installed("docker"):
        return [Check(_NAME, False, "Docker's SDK is not installed", install_command("docker"), required=wanted)]
    settings = config.sandbox if config is not None and isinstance(config.sandbox, DockerConfig) else DockerConfig()
    address = engine_address(settings.host)
    socket = Path(address.removeprefix("unix://"))
    if address.startswith("unix://") and not os.access(socket, os.R_OK | os.W_OK):
        there = "it may not be used" if socket.exists() else "nothing there"
        return [Check(_NAME, False, f"{there}: {address}", _fix(exists=socket.exists()), required=wanted)]
    from sandboxes.docker_api import ENGINE_ERRORS, connect, reason

    try:
        api = connect(address, timeout_s=10.0)
        try:
            info = api.info()
            checks = [Check(_NAME, True, f"{info['ServerVersion']} at {address}", required=wanted)]
            if not wanted:
                return [*checks, *gpu_runtime(info)]
            names = {settings.image, settings.relay_base}
            return checks + [image(name, _architecture(api, name), info["Architecture"]) for name in sorted(names)]
        finally:
            api.close()
    except ENGINE_ERRORS as error:
        return [Check(_NAME, False, f"{address}: {reason(error)}", _fix(exists=True), required=wanted)]


def image(name: str, architecture: str | None, kernel: str) -> Check:
    """`architecture` None = the engine does not have the image yet, and will pull its own kind."""
    title, own = f"image {name}", _KERNELS.get(kernel, kernel)
    if architecture is None:
        return Check(title, True, "not in the engine: it is pulled at the start", required=False)
    fix = f"docker pull --platform linux/{own} {name}, or build it for linux/{own}"
    return Check(title, architecture == own, f"for {architecture}, the engine runs {own}", fix)


def gpu_runtime(info: dict[str, Any]) -> list[Check]:
    """Only where the machine has a GPU: whether containers can be given it."""
    if shutil.which("nvidia-smi") is None:
        return []
    cdi = any("nvidia.com/gpu" in str(device.get("ID")) for device in info.get("DiscoveredDevices") or [])
    ok = cdi or "nvidia" in (info.get("Runtimes") or {})
    fix = (
        "install the NVIDIA container toolkit, then: nvidia-ctk runtime configure --runtime=docker, and restart Docker"
    )
    return [Check("GPUs for containers", ok, "the runtime nvidia" if ok else "no runtime nvidia", fix, required=False)]


def _architecture(api: Any, name: str) -> str | None:
    from sandboxes.docker_api import ENGINE_ERRORS, is_absent

    try:
        return str(api.inspect_image(name)["Architecture"])
    except ENGINE_ERRORS as error:
        if is_absent(error):
            return None
        raise


def _fix(*, exists: bool) -> str:
    from sandboxes.docker_volumes import socket_volume

    if socket_volume() is not None:
        return "`docker compose logs socket-proxy` says why: DOCKER_SOCKET in .env must be the engine's socket"
    return (
        "let your user use it (group docker), or set DOCKER_HOST"
        if exists
        else "start Docker (`systemctl start docker`), or set DOCKER_HOST"
    )
