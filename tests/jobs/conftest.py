"""The stand-in Hub, with this process's client pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.standin import TOKEN, Standin, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """Jobs are played by hand. The Xet protocol, which has servers of its own, is off."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its variable is read when the library is imported
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serving(Standin(folder=tmp_path / "jobs")) as standin:
        monkeypatch.setenv("HF_ENDPOINT", standin.url)
        yield standin
