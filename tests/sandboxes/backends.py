"""Every backend that the conformance suite runs on, and how a test opens it.

To add one: a function that gives an open backend, or skips with the reason, and a line in `OPENERS`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandboxes.base import Access, Backend, SandboxError


@dataclass(frozen=True)
class Place:
    """Where a test's backend may put things."""

    folder: Path
    registry: Path
    request: pytest.FixtureRequest


Opener = Callable[[Place], AbstractAsyncContextManager[Backend]]


@asynccontextmanager
async def local(place: Place, isolation: str = "none") -> AsyncIterator[Backend]:
    from sandboxes.local import LocalBackend, LocalConfig

    config = LocalConfig(root=place.folder / "boxes", isolation=isolation)  # type: ignore[arg-type]
    async with LocalBackend(config, run_id="test", registry=place.registry, access=Access()) as backend:
        yield backend


@asynccontextmanager
async def local_bwrap(place: Place) -> AsyncIterator[Backend]:
    try:
        async with local(place, "bubblewrap") as backend:
            yield backend
    except SandboxError as e:
        if "bubblewrap" in str(e) and "install" in str(e):
            pytest.skip(str(e))
        raise


@asynccontextmanager
async def docker(place: Place) -> AsyncIterator[Backend]:
    from sandboxes.docker import DockerBackend, DockerConfig

    host = place.request.getfixturevalue("docker_engine")
    image = place.request.getfixturevalue("docker_base_image")
    config = DockerConfig(host=host, image=image, relay_base=image, spare_relays=0)
    async with DockerBackend(config, run_id="test", registry=place.registry, access=Access()) as backend:
        yield backend


@asynccontextmanager
async def e2b(place: Place) -> AsyncIterator[Backend]:
    from tests.sandboxes.e2b_opening import open_e2b

    standin = place.request.getfixturevalue("standin")
    async with open_e2b(standin, place.folder) as backend:
        yield backend


@asynccontextmanager
async def harbor(place: Place) -> AsyncIterator[Backend]:
    """Through the bridge to Harbor, with an environment of our own in the place of a provider's."""
    from sandboxes.harbor import HarborBackend, HarborConfig

    python = place.request.getfixturevalue("harbor_python")
    environ = place.request.getfixturevalue("monkeypatch")
    environ.setenv("DOCKER_HOST", place.request.getfixturevalue("docker_engine"))
    environ.setenv("PYTHONPATH", str(Path(__file__).parent))  # where Harbor finds the environment
    image = place.request.getfixturevalue("docker_base_image")
    config = HarborConfig(name="harbor_plain_docker:PlainDockerEnvironment", python=Path(python), image=image)
    async with HarborBackend(config, run_id="test", registry=place.registry, access=Access()) as backend:
        yield backend


OPENERS: dict[str, Opener] = {
    "local": local,
    "local-bwrap": local_bwrap,
    "docker": docker,
    "e2b": e2b,
    "harbor": harbor,
}
