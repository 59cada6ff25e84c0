"""Fixtures for grading: backends to score on, one open at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes import bubblewrap, open_backend
from sandboxes.base import Access, Backend
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig

OpenBackend = Callable[[str], Backend]
OpenDocker = Callable[[], tuple[Path, Backend]]

# A library that plants the reward in whatever program it is loaded into.
_EVIL_C = r"""
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void plant(void) {
  int fd = open("/logs/verifier/reward.json", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0) { if (write(fd, "{\"reward\": 1}", 13)) {} close(fd); }
}
"""


@pytest.fixture
def open_to(tmp_path: Path, request: pytest.FixtureRequest) -> OpenBackend:
    """A backend by name: local, bubblewrap, docker. It is not entered yet; skips where it cannot be had."""

    def make(kind: str) -> Backend:
        config: Any
        if kind == "docker":
            config = _docker(*(request.getfixturevalue(name) for name in ("docker_engine", "docker_base_image")))
        else:
            isolation = "none" if kind == "local" else kind
            config = LocalConfig.model_validate({"root": str(tmp_path / "root"), "isolation": isolation})
        return open_backend(config, run_id="grading", registry=tmp_path / "owned", access=Access())

    return make


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory, docker_engine: str, docker_base_image: str) -> OpenDocker:
    """A backend in containers, with a registry of its own in a new folder, as often as one is asked for."""

    def make() -> tuple[Path, Backend]:
        folder = tmp_path_factory.mktemp("graded")
        config = _docker(docker_engine, docker_base_image)
        return folder, open_backend(config, run_id="grading", registry=folder / "owned", access=Access())

    return make


def _docker(host: str, image: str) -> DockerConfig:
    return DockerConfig(host=host, image=image, relay_base=image, spare_relays=0)


@pytest.fixture(scope="session")
def evil_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.c").write_text(_EVIL_C)
    try:
        argv = ["cc", "-shared", "-fPIC", "-o", str(folder / "evil.so"), str(folder / "evil.c")]
        subprocess.run(argv, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no C compiler to make a library to preload with ({e})")
    return folder / "evil.so"


@pytest.fixture(scope="session")
def bubblewrap_works() -> None:
    """Skips with the reason where bubblewrap cannot isolate here."""
    problem = bubblewrap.find().problem
    if problem is not None:
        pytest.skip(problem)
