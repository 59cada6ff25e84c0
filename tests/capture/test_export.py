"""Exports are read back by the libraries they are for, with the numbers that were recorded."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from capture_proxy import export, trace
from tests.capture.recording import Recording, answer, reply, said, system, user

ABOUT = {"rollout_id": "r", "group_id": 3, "task": "t", "harness": "h", "outcome": "ok", "reward": 0.5}


@pytest.fixture
def session() -> Recording:
    """A loop with few-shot messages and reasoning, a second branch of it, a title, and a compaction."""
    session = Recording("r")
    shots = [
        user("example"),
        reply("shot", ("bash", {"a": 1})),
        answer("x"),
        said("user", [{"type": "text", "text": "go"}]),
    ]
    history = [system(), *shots]
    got = session.ask(history, reply("look", ("bash", {"command": "ls é"}), ("bash", {"n": 2}), reasoning="hm"))
    history = [*history, got, answer("one", "c0"), answer("two", "c1")]
    session.ask(history, reply("left"), at=5.0)
    session.ask([*history, user("right?")], reply("right"), at=5.1)
    session.ask([system("Name it."), user("x")], reply("title"), offered=None)
    session.work([system(), user("<summary>so far</summary>")], 2)
    return session


def rows_of(session: Recording, **about: Any) -> list[dict[str, Any]]:
    return export.training_rows(trace.to_row_trace(session.capture).model_dump(), **{**ABOUT, **about})


def test_rows_hold_ids_masks_logprobs_versions_messages_and_the_reward(session: Recording) -> None:
    rows = rows_of(session)
    assert [row["row"] for row in rows] == [0, 1, 2]
    first = rows[0]
    assert {name: first[name] for name in ABOUT} == ABOUT
    leaf = session.turns[1]
    assert first["input_ids"] == leaf.prompt_ids_P + leaf.completion_ids_T
    assert len(first["input_ids"]) == len(first["loss_mask"]) == len(first["logprobs"])
    trained = [i for i, m in enumerate(first["loss_mask"]) if m]
    spans = [range(s["start"], s["end"]) for s in first["version_spans"]]
    assert trained == [i for span in spans for i in span] and {s["version"] for s in first["version_spans"]} == {"v3"}
    sampled = [token for turn in session.turns[:2] for token in turn.completion_ids_T]
    assert [first["input_ids"][i] for i in trained] == sampled
    assert [first["logprobs"][i] for i in trained] == [p for t in session.turns[:2] for p in t.logprobs_T]
    assert first["messages"][-1]["content"] == "left" and first["messages"][4]["content"] == "go"
    assert first["messages"][5]["reasoning_content"] == "hm"
    assert json.loads(first["messages"][5]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls é"}


@pytest.mark.parametrize("reward", [0.5, None])
def test_parquet_and_datasets_give_back_the_rows(session: Recording, tmp_path: Path, reward: float | None) -> None:
    import datasets
    import pyarrow.parquet

    rows = rows_of(session, reward=reward)
    assert export.write_parquet(iter(rows), tmp_path / "rows.parquet") == 3
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == rows
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "c"))
    assert loaded["train"].to_list() == rows
    assert export.write_dataset(iter(rows), tmp_path / "folder") == 3
    assert datasets.load_from_disk(str(tmp_path / "folder")).to_list() == rows
    assert export.write_jsonl(iter(rows), tmp_path / "rows.jsonl") == 3
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()] == rows


def test_without_a_row_parquet_has_its_columns_and_a_folder_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    assert export.write_parquet(iter([]), tmp_path / "rows.parquet") == 0
    assert "input_ids" in pyarrow.parquet.read_table(tmp_path / "rows.parquet").column_names
    with pytest.raises(ValueError, match="no row to write"):
        export.write_dataset(iter([]), tmp_path / "folder")


def test_a_trace_with_a_turn_per_call_gives_rows_too(session: Recording) -> None:
    calls = trace.to_training_trace(session.capture).model_dump()
    rows = export.training_rows(calls, **ABOUT)
    assert [row["node_id"] for row in rows] == ["r-0000", "r-0001", "r-0002", "r-0004", "r-0005"]
    assert all(
        sum(row["loss_mask"]) == row["version_spans"][0]["end"] - row["version_spans"][0]["start"] for row in rows
    )


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Call(_Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(_Strict):
    source_call_id: str | None = None
    content: str | None = None


class Observation(_Strict):
    results: list[Result]


class Metrics(_Strict):
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float] | None = None


class Step(_Strict):
    step_id: int
    timestamp: str
    source: Literal["system", "user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class Agent(_Strict):
    name: str
    version: str
    model_name: str | None


class FinalMetrics(_Strict):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int


class Trajectory(_Strict):
    """The part of Harbor's model that is written, with the rules that its validators state."""

    schema_version: Literal["ATIF-v1.7"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step]
    final_metrics: FinalMetrics
    extra: dict[str, Any]

    def model_post_init(self, _: Any) -> None:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        for step in self.steps:
            datetime.fromisoformat(step.timestamp)
            if step.source != "agent":
                assert (step.reasoning_content, step.tool_calls, step.metrics, step.observation) == (None,) * 4
            known = {call.tool_call_id for call in step.tool_calls or []}
            assert all(
                r.source_call_id in {None, *known} for r in (step.observation.results if step.observation else [])
            )


def test_an_atif_trajectory_tells_each_branch_with_the_exact_tokens_of_every_step(session: Recording) -> None:
    documents = json.loads(json.dumps(export.to_atif(session.capture, agent="opencode", version="1.2", **ABOUT)))
    told = [Trajectory.model_validate(document) for document in documents]
    assert [t.trajectory_id for t in told] == ["r-0", "r-1", "r-2"] and {t.session_id for t in told} == {"r"}
    left, right, _ = told
    assert [s.source for s in left.steps] == ["system", "user", "agent", "user", "agent", "agent"]
    assert left.steps[2].metrics is None and left.steps[2].extra == {"sampled": False}, "a few-shot reply"
    acted = left.steps[4]
    assert acted.reasoning_content == "hm" and acted.tool_calls is not None and acted.observation is not None
    assert acted.tool_calls[0].arguments == {"command": "ls é"}
    assert [(r.source_call_id, r.content) for r in acted.observation.results] == [("c0", "one"), ("c1", "two")]
    assert acted.metrics is not None and acted.extra is not None
    assert acted.metrics.prompt_token_ids == session.turns[0].prompt_ids_P
    assert acted.metrics.completion_token_ids == session.turns[0].completion_ids_T
    assert acted.metrics.logprobs == session.turns[0].logprobs_T
    assert acted.extra["policy_versions"] == [{"version": "v3", "start": 0, "end": acted.metrics.completion_tokens}]
    assert [bool(s.is_copied_context) for s in right.steps] == [True] * 5 + [False] * 2
    assert left.extra["reward"] == 0.5 and left.agent == Agent(name="opencode", version="1.2", model_name="m")
    assert not any("title" in step.message for t in told for step in t.steps)
