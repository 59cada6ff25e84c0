"""Real OpenEnv servers that the tests of this room share: importing OpenEnv takes each of them seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.loops.openenv_serving import ADDING, SINGLE, SPEAKING


@pytest.fixture(scope="session")
def adding_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(ADDING, tmp_path_factory)


@pytest.fixture(scope="session")
def single_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(SINGLE, tmp_path_factory)


@pytest.fixture(scope="session")
def speaking_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(SPEAKING, tmp_path_factory)


def _served(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In a loop of its own: a test's loop ends with the test."""
    from harness_trainer.environments.openenv_config import OpenEnvConfig
    from harness_trainer.loops.openenv.servers import serving

    server = serving(OpenEnvConfig(target=target, max_episodes=4), tmp_path_factory.mktemp("openenv") / "registry")
    with asyncio.Runner() as runner:
        url = runner.run(server.__aenter__()).url
        yield url
        runner.run(server.__aexit__(None, None, None))
