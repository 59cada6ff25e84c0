"""Fixtures that several rooms share: a run's store, the real Docker engine, an image for containers, real Harbor.

The engine is $DOCKER_HOST, else Docker's own socket; `.ci/docker-engine start` starts one where there is none.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness_trainer.rollouts.store import RolloutStore

IMAGES = ("python:3.12-slim", "ht-base:bookworm", "python:3.12", "python:3.11-slim", "python:3-slim")
HINT = 'eval "$(.ci/docker-engine start)" starts one'
HARBOR_HINT = "make setup-harbor, or set HARNESS_TRAINER_HARBOR_PYTHON to a Python 3.12 that has it"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    """The store of a run, in `tmp_path`, once the first policy is published: rollouts may begin."""
    from harness_trainer.rollouts.store import RolloutStore

    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    yield store
    store.close()


@pytest.fixture(scope="session")
def docker_engine() -> str:
    """Address of a real engine that answers, as DOCKER_HOST wants it."""
    import docker

    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        client = docker.DockerClient(base_url=host, timeout=10, **_tls())
        client.ping()
        client.close()
    except (docker.errors.DockerException, OSError) as e:
        pytest.skip(f"no Docker engine answers at {host} ({str(e)[:120]}); {HINT}")
    return host


@pytest.fixture(scope="session")
def docker_base_image(docker_engine: str) -> str:
    """Name of an image with sh, bash and python3, never pulled: $HARNESS_TRAINER_TEST_IMAGE or one that is there."""
    import docker

    own = os.environ.get("HARNESS_TRAINER_TEST_IMAGE")
    client = docker.DockerClient(base_url=docker_engine, timeout=30, **_tls())
    try:
        here = {tag for image in client.images.list() for tag in image.tags}
    finally:
        client.close()
    for name in [own] if own else IMAGES:
        if name in here:
            return name
    pytest.skip(f"the engine at {docker_engine} has none of {own or ', '.join(IMAGES)}; {HINT} with a base image")


@pytest.fixture(scope="session")
def harbor_python() -> str:
    """Harbor's own interpreter."""
    own = os.environ.get("HARNESS_TRAINER_HARBOR_PYTHON")
    python = own or str(Path(__file__).parents[1] / ".venv-harbor" / "bin" / "python")
    if shutil.which(python) is None:
        pytest.skip(f"Harbor is not installed (no {python}); {HARBOR_HINT}")
    found = subprocess.run([python, "-c", "import harbor"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"{python} cannot import harbor; {HARBOR_HINT}")
    return python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "docker_engine" in getattr(item, "fixturenames", ()):
            item.add_marker("docker")
    # The long rooms first, or one process ends up alone with them.
    items.sort(key=lambda item: _LONG_FIRST.get(item.nodeid.split("/")[1], len(_LONG_FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Several processes (`pytest -n 2`) share the rooms: each room's tests run one after the other in one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _room(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # by their number of tests, which says nothing: keep our order
    return Rooms(config, log)


# Folders, longest first. The first two start engines and whole runs, each of which wants the machine to itself.
_LONG_FIRST = {
    name: place
    for place, name in enumerate(("e2e", "engine", "sandboxes", "rollouts", "learner", "capture", "rewards"))
}


@functools.cache
def _room(file: str) -> str:
    """The folder of a test file; of files that use Docker (what they count there bears their own labels), each is one.

    All that start engines and whole runs are one room, and all that bomb sandboxes.
    """
    room = Path(file).parts[1]
    uses_docker = "docker_engine" in Path(__file__).parents[1].joinpath(file).read_text()
    if uses_docker and room not in ("sandboxes", "rewards"):
        return f"{room}:{Path(file).name}"
    return "engines" if room in ("e2e", "engine") else room


def _tls() -> dict[str, object]:
    from docker.utils import kwargs_from_env

    return {key: value for key, value in kwargs_from_env().items() if key != "base_url"}
