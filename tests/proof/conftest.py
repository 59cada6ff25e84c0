"""Keeps a notice of google-genai about its own classes out of the reports of this folder."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quiet = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(quiet)
