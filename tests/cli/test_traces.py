"""`traces` shows and exports what was captured, and an export is OpenEnv's own document."""

import asyncio
import json

import pytest

from capture_proxy.store import Store
from harness_trainer.cli import main
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from tests.capture.recording import Recording, system, user

TRACE = {
    "schema_version": 1,
    "turns": [
        {
            "node_id": "g00000-0-abc-0000",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "per_token_logps": [-0.5, -0.25],
            "loss_mask": [0, 0, 1, 1],
            "request": {"messages": [{"role": "user", "content": "Say caf\u00e9."}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": "caf\u00e9"}}]},
            "metadata": {"role": "agent"},
        }
    ],
}


@pytest.fixture
def run_dir(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.open_group(0, "task", "h")
    for slot, (rollout_id, trace, reward) in enumerate([("g00000-0-abc", TRACE, 0.75), ("g00000-1-xyz", None, None)]):
        outcome = Outcome.OK if trace else Outcome.INFRA_FAILED
        store.start_rollout(rollout_id, 0, slot, 0)
        result = RolloutResult(rollout_id, 0, "task", "h", 0, outcome, reward, trace=trace, detail="why not")
        store.finish_rollout(result, final=True)
    store.close()
    return str(tmp_path)


def test_ls_has_a_line_per_rollout_and_a_dash_for_no_reward(run_dir, capsys):
    assert main(["traces", "ls", "--run-dir", run_dir]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("g00000-0-abc" in line and "0.750" in line for line in lines)
    assert any("g00000-1-xyz" in line and " - " in line and "infra_failed" in line for line in lines)


def test_show_takes_the_start_of_an_id_and_shows_tokens_on_request(run_dir, capsys):
    assert main(["traces", "show", "g00000-0", "--run-dir", run_dir, "--ids"]) == 0
    out = capsys.readouterr().out
    assert "caf\u00e9" in out and "sampled ids: [3, 4]" in out and "2 sampled, 2 may be trained" in out


@pytest.mark.parametrize(("prefix", "says"), [("nope", "traces ls"), ("g00000", "2 rollouts start with")])
def test_show_of_no_or_many_rollouts_says_what_to_do(run_dir, capsys, prefix, says):
    assert main(["traces", "show", prefix, "--run-dir", run_dir]) == 2
    assert says in capsys.readouterr().err


def test_an_export_is_read_back_by_openenv_as_it_was(run_dir, tmp_path, capsys):
    from openenv.core.harness.training import TrainingTrace

    out = tmp_path / "traces.jsonl"
    assert main(["traces", "export", "--run-dir", run_dir, "--out", str(out)]) == 0
    (line,) = out.read_text(encoding="utf-8").splitlines()
    document = json.loads(line)
    trace = TrainingTrace.model_validate(document["training_trace"])
    assert trace.model_dump() == {**TRACE}
    assert (document["rollout_id"], document["reward"]) == ("g00000-0-abc", 0.75)
    assert "1 traces" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["parquet", "hf", "jsonl"])
def test_rows_are_exported_for_datasets(run_dir, tmp_path, capsys, form):
    import datasets

    out = tmp_path / "rows"
    assert main(["traces", "export", "--run-dir", run_dir, "--format", form, "--out", str(out)]) == 0
    if form == "hf":
        (row,) = datasets.load_from_disk(str(out)).to_list()
    elif form == "parquet":
        (row,) = datasets.Dataset.from_parquet(str(out), cache_dir=str(tmp_path / "cache")).to_list()
    else:
        row = json.loads(out.read_text(encoding="utf-8"))
    assert (row["input_ids"], row["loss_mask"], row["logprobs"]) == ([1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -0.5, -0.25])
    assert (row["reward"], row["outcome"], row["rollout_id"]) == (0.75, "ok", "g00000-0-abc")
    assert [m["content"] for m in row["messages"]] == ["Say caf\u00e9.", "caf\u00e9"]
    assert "1 rows" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["openenv", "atif"])
def test_calls_come_from_the_capture_that_the_file_holds(run_dir, tmp_path, capsys, form):
    session = Recording("g00000-0-abc")
    session.work([system(), user("go")], 3)
    asyncio.run(_keep(session, tmp_path / "store.sqlite"))
    assert main(["traces", "export", "--run-dir", run_dir, "--format", form]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    if form == "atif":
        assert document["agent"]["name"] == "h" and document["extra"]["reward"] == 0.75
        steps = [step for step in document["steps"] if "metrics" in step]
        assert [step["metrics"]["prompt_token_ids"] for step in steps] == [list(t.prompt_ids_P) for t in session.turns]
    else:
        nodes = [turn["node_id"] for turn in document["training_trace"]["turns"]]
        assert nodes == [turn.turn_id for turn in session.turns]
    assert main(["traces", "show", "g00000-0", "--run-dir", run_dir]) == 0
    assert capsys.readouterr().out.count("-- turn g00000-0-abc-000") == 3


async def _keep(session, path):
    store = Store.open(path)
    for turn in session.turns:
        await store.put_turn(turn, session.session)
    await store.close()


def test_a_rollout_without_its_calls_is_named_when_they_are_asked_for(run_dir, capsys):
    assert main(["traces", "export", "--run-dir", run_dir, "--format", "atif"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "g00000-0-abc is left out" in captured.err


def test_a_binary_form_needs_a_place_to_go(run_dir, capsys):
    assert main(["traces", "export", "--run-dir", run_dir, "--format", "parquet"]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_line(run_dir, tmp_path, capsys):
    for form in ("openenv", "parquet"):
        out = str(tmp_path / "missing" / "file")
        assert main(["traces", "export", "--run-dir", run_dir, "--format", form, "--out", out]) == 2
        assert "missing" in capsys.readouterr().err
