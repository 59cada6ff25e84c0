"""Runs to look at: a whole one made by the rooms that write a real one, and what a hostile agent leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from capture_proxy.graph import assign_roles
from capture_proxy.store import Store
from capture_proxy.trace import to_row_trace
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from harness_trainer.rundir import RunDir
from harness_trainer.view.app import make_app
from harness_trainer.view.guard import Guard
from tests.audit.made_run import MadeRun
from tests.capture.recording import Recording

ORIGIN = "http://127.0.0.1:8765"
_VOID = {"meta", "link", "input", "br"}


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """Not to be changed: `made` gives a copy."""
    run = MadeRun(tmp_path_factory.mktemp("view") / "whole").make()
    lines = [
        {**line, "reward_mean": 0.25 * line["step"], "reward_std": 0.5, "loss": 0.1, "ratio_mean": 1.0, "kl": None,
         "step_s": 4.0, "metrics": {"completions/mean_length": 12.0}}
        for line in map(json.loads, run.run.metrics.read_text().splitlines())
    ]  # fmt: skip
    run.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def made(whole_run: MadeRun, tmp_path: Path) -> MadeRun:
    return whole_run.copy(tmp_path / "run")


def client_of(run: RunDir, **guard: Any) -> TestClient:
    return TestClient(Guard(make_app(run), **guard), base_url=ORIGIN, raise_server_exceptions=False)


@pytest.fixture(scope="session")
def whole(whole_run: MadeRun) -> Iterator[TestClient]:
    with client_of(whole_run.run) as client:
        yield client


class Page(HTMLParser):
    """A parsed page; raises AssertionError for tags that do not match, and for what the policy would not let work."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>"
        assert not any(name.startswith("on") or name == "style" for name in names), f"inline code in <{tag} {names}>"
        values = dict(attrs)
        self.links += [str(values[name]) for name in ("href", "src", "data-src") if name in values]
        if tag == "script":
            self.scripts.append(str(values.get("src")))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> where {self.open[-3:]} is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(client: TestClient, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, answer.text[:500]
    page = Page(answer.text)
    assert page.scripts == ([] if "fragment" in path else ["/static/view.js"])
    return page


Record = Callable[[Recording], None]


def add_rollout(run: RunDir, recording: Recording, *, group_id: int, slot: int = 0, **fields: Any) -> RolloutResult:
    """A rollout with these calls, as gateway and runner leave it."""
    rollout_id = recording.session.session_id
    asyncio.run(put_calls(run, recording))
    assign_roles(recording.turns)
    given = {"task": "task", "harness": "h", "attempt": 0, "outcome": Outcome.OK, "reward": 0.5, **fields}
    result = RolloutResult(rollout_id, group_id, trace=to_row_trace(recording.capture).model_dump(), **given)
    store = RolloutStore(run.store)
    try:
        store.start_rollout(rollout_id, group_id, slot, 0)
        store.finish_rollout(result, final=True)
    finally:
        store.close()
    return result


async def put_calls(run: RunDir, recording: Recording) -> None:
    store = Store.open(run.store)
    try:
        await store.put_session(recording.session)
        for turn in recording.turns:
            await store.put_turn(turn, recording.session)
    finally:
        await store.close()
