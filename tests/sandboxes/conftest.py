"""Fixtures for sandbox tests: a private registry, a private root, and local sandboxes made there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from backends import OPENERS
from local_boxes import backend, running

from sandboxes.base import BoxSpec, Limits, Sandbox
from tests.sandboxes.e2b_standin import Standin, standing_in
from tests.sandboxes.e2b_standin_box import unusable

ISOLATIONS = ["none", "bubblewrap"]


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "owned"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(isolation: str, root: Path, registry: Path) -> Callable[..., Sandbox]:
    def make(**limits: float) -> Sandbox:
        settings = asdict(Limits(**limits))  # type: ignore[arg-type]
        return backend(isolation, root, registry, limits=settings).sandbox(BoxSpec("test"))

    return make


@pytest.fixture
async def box(make: Callable[..., Sandbox]) -> AsyncIterator[Sandbox]:
    async with make() as sandbox:
        yield sandbox


@pytest.fixture
def on_host(root: Path, box: Sandbox) -> Callable[[str], Path]:
    """Where a file of `box` lies on this machine."""
    return lambda path: root / box.sandbox_id / "root" / path.lstrip("/")


@pytest.fixture
def left(root: Path) -> Callable[[Sandbox], list[str]]:
    """What runs in a sandbox."""
    return lambda sandbox: running(root, sandbox.sandbox_id)


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Standin]:
    """E2B's API and sandboxes on this machine."""
    if why := unusable():
        pytest.skip(why)
    with standing_in(tmp_path / "e2b") as service:
        yield service


# --- the table of the conformance suite ---

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}
_cells: dict[str, dict[str, list[str]]] = {}  # test -> backend -> outcome of each of its inputs


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file, _, name = report.nodeid.partition("::")
    if not file.endswith("test_conformance.py") or (report.when != "call" and report.outcome == "passed"):
        return
    test, _, inputs = name.removesuffix("]").partition("[")
    backend = next((b for b in sorted(OPENERS, key=len, reverse=True) if f"{inputs}-".startswith(f"{b}-")), None)
    if backend is not None:
        _cells.setdefault(test, {}).setdefault(backend, []).append(report.outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Backend x test: "ok" (how many inputs), "FAILED", "-" = this backend does not promise it, or is not here."""
    backends = [b for b in OPENERS if any(b in row for row in _cells.values())]
    if not backends:
        return
    terminalreporter.section("sandbox conformance")
    width = max(map(len, _cells)) - len("test_")
    terminalreporter.write_line(" ".join(["".ljust(width), *(b.rjust(11) for b in backends)]))
    for test, row in _cells.items():
        cells = [_cell(row.get(b, [])).rjust(11) for b in backends]
        terminalreporter.write_line(" ".join([test.removeprefix("test_").replace("_", " ").ljust(width), *cells]))


def _cell(outcomes: list[str]) -> str:
    worst = next((o for o in ("failed", "passed", "skipped") if o in outcomes), None)
    if worst is None:
        return ""
    count = outcomes.count(worst)
    return f"{_MARKS[worst]} ({count})" if count > 1 else _MARKS[worst]
