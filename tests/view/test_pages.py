"""Every page and every answer over a whole run: well-formed, every link of it leads somewhere, unknown is never 0."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import harness_trainer.view
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rundir import RunDir
from tests.audit.made_run import MadeRun
from tests.capture.recording import Recording, system, user
from tests.view.conftest import Page, add_rollout, client_of, page_of

STATIC = Path(harness_trainer.view.__file__).parent / "static"


def test_every_link_of_every_page_leads_to_a_page(whole: TestClient) -> None:
    seen, waiting = set[str](), ["/"]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = whole.get(path)
        assert answer.status_code == 200, (path, answer.text[:300])
        if answer.headers["content-type"].startswith("text/html"):
            waiting += [link for link in Page(answer.text).links if link.startswith("/")]
        elif path.startswith("/api/"):
            json.loads(answer.text)
    kinds = ("/rollouts?", "/groups?", "/rollouts/g0-0-b/calls/1", "/rollouts/g0-0-b/rows/0", "/settings", "/logs")
    assert all(any(path.startswith(kind) for path in seen) for kind in kinds)


def test_the_overview_says_what_the_store_says(whole: TestClient, whole_run: MadeRun) -> None:
    of = whole.get("/api/overview").json()
    with closing(RolloutStore(whole_run.run.store)) as store:
        counts = {k: of["outcomes"].get(k, 0) + of["evaluated_outcomes"].get(k, 0) for k in store.outcome_counts()}
        assert counts == store.outcome_counts()
        assert {state: of["groups"][state] for state in store.group_counts()} == store.group_counts()
        assert of["dropped"] == store.drop_counts() and of["policy_version"] == store.policy_version()
    assert of["state"] == "finished" and of["num_steps"] == 2 and of["quarantined"] == {"poisoned": "not healthy"}
    assert [one["step"] for one in of["evaluations"]] == [0] and of["evaluations"][0]["num_scored"] == 2
    parts = {part["part"]: part for part in of["parts"]}
    assert parts["learner"]["num_starts"] == 2 and parts["engine"]["state"] == "gone with the run"
    (agent,) = of["harnesses"]
    assert agent["num_scored"] == 8 and agent["reward_mean"] == pytest.approx(
        (0.5 + 0.25 + 0.5 + 0.5 + 1 + 0 + 0 + 1) / 8
    )
    page = page_of(whole, "/")
    assert "evaluation after step 0" in page.text and "no_spread" in page.text


def test_unknown_is_said_and_never_zero(whole: TestClient) -> None:
    of = whole.get("/api/overview").json()
    assert of["evaluations"][0]["reward_mean"] is None and of["evaluations"][0]["pass_at_1_ci"] is None
    failed = next(r for r in whole.get("/api/rollouts?outcome=infra_failed").json()["rollouts"])
    assert failed["reward"] is None and failed["num_turns"] is None, "nothing was captured, so nobody counted"
    lost = whole.get("/api/rollouts/g2-0-a").json()
    assert lost["outcome"] == "cancelled" and lost["num_turns"] is None and lost["result"] == {}
    page = page_of(whole, "/rollouts/g2-0-a")
    assert "agent's exit codeunknown" in page.text.replace("\n", "") and "rewardunknown" in page.text.replace("\n", "")
    curves = page_of(whole, "/")
    assert "KL(old, new)" not in curves.text, "a curve of which no step knows anything is not drawn as zeros"


def test_rollouts_are_filtered_and_paged_by_key(made: MadeRun) -> None:
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(50, "many", "other")
        for n in range(230):
            store.start_rollout(f"m{n:03d}", 50, n, 0)
    # The same moment for all: only the id tells them apart.
    made.sql("UPDATE rollouts SET started_at = 5.125 WHERE group_id = 50")
    client = client_of(made.run)
    seen: list[str] = []
    query = "/api/rollouts?group=50"
    while True:
        page = client.get(query).json()
        seen += [one["rollout_id"] for one in page["rollouts"]]
        if page["next"] is None:
            break
        query = f"/api/rollouts?group=50&before={page['next']}"
    assert seen == [f"m{n:03d}" for n in reversed(range(230))]
    assert "older" in page_of(client, "/rollouts?group=50").text


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("task=moo", {"g2-0-a", "g2-0-b", "g2-1-a", "g2-2-a", "g3-0-a", "g3-1-a"}),
        ("outcome=truncated", {"g0-1-a"}),
        ("min_reward=0.9&harness=h", {"g2-0-b", "g3-1-a"}),
        ("max_reward=0", {"g2-2-a", "g3-0-a"}),
        ("step=1&final=1", {"g0-0-b", "g0-1-a"}),
        ("group=4", {"g4-0-a", "g4-1-a"}),
        ("policy=99", set()),
        ("task=%00%ED%A0%80%27%3B--", set()),
    ],
)
def test_filters_find_what_they_say(whole: TestClient, query: str, ids: set[str]) -> None:
    assert {one["rollout_id"] for one in whole.get(f"/api/rollouts?{query}").json()["rollouts"]} == ids
    page_of(whole, f"/rollouts?{query}")


@pytest.mark.parametrize(
    "query", ["outcome=fine", "group=x", "min_reward=nan", "before=x~y", "policy=99999999999999999999", "final=2"]
)
def test_a_filter_that_cannot_be_is_one_line(whole: TestClient, query: str) -> None:
    name = query.partition("=")[0]
    answer = whole.get(f"/api/rollouts?{query}")
    assert answer.status_code == 400 and name in answer.json()["error"]
    assert name in page_of(whole, f"/rollouts?{query}", 400).text


def test_groups_have_rewards_and_advantages(made: MadeRun) -> None:
    groups = {g["group_id"]: g for g in client_of(made.run).get("/api/groups").json()["groups"]}
    assert [one["advantage"] for one in groups[0]["rollouts"]] == pytest.approx([1.0, -1.0], abs=1e-6)
    middle = groups[2]["rollouts"]
    assert [one["reward"] for one in middle] == [1.0, None, 0.0] and middle[1]["advantage"] is None
    assert [one["advantage"] for one in groups[-1]["rollouts"]] == [None], "an evaluation has no advantages"
    made.settings("learner", objective={"advantage": "global"})
    groups = {g["group_id"]: g for g in client_of(made.run).get("/api/groups").json()["groups"]}
    assert groups[0]["rollouts"][0]["advantage"] == pytest.approx(1.0, abs=1e-6)
    assert groups[3]["rollouts"][0]["advantage"] is None, "its step is not known yet"
    made.settings("learner", objective={"advantage": "group_mean", "truncated": "penalize", "truncation_penalty": 0.25})
    groups = {g["group_id"]: g for g in client_of(made.run).get("/api/groups").json()["groups"]}
    assert [one["advantage"] for one in groups[0]["rollouts"]] == [0.25, -0.25]


def test_a_call_has_what_is_new_in_it_its_tokens_and_whether_they_are_trained(made: MadeRun) -> None:
    session = Recording("deep")
    session.ask([user("name this")], {"role": "assistant", "content": "A title"}, offered=None)
    session.work([system(), user("go")], 3)
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(60, "deep", "h")
    add_rollout(made.run, session, group_id=60, outcome=Outcome.TRUNCATED, detail="cut", exit_code=0)
    client = client_of(made.run)
    calls = client.get("/api/rollouts/deep/calls").json()["calls"]
    assert [call["is_side"] for call in calls] == [True, False, False, False]
    assert [call["parent"] for call in calls] == [None, None, 1, 2] and calls[3]["lineages"] == calls[1]["lineages"]
    second = client.get("/api/rollouts/deep/calls/2").json()
    assert second["num_repeated"] == 2 and [m["role"] for m in second["messages"]] == ["assistant", "tool"]
    assert second["calls"] == ["bash"] and second["reply"]["calls"] == [
        {"name": "bash", "arguments": '{"command": "ls 1"}'}
    ]
    assert len(client.get("/api/rollouts/deep/calls/2?whole=1").json()["messages"]) == 4
    sampled = client.get("/api/rollouts/deep/calls/2/sampled").json()
    turn = session.turns[2]
    assert [t["id"] for t in sampled["tokens"]] == turn.completion_ids_T and not sampled["has_texts"]
    assert [t["logprob"] for t in sampled["tokens"]] == turn.logprobs_T
    assert {(t["trained"], t["version"]) for t in sampled["tokens"]} == {(1, "v3")}
    assert {t["trained"] for t in client.get("/api/rollouts/deep/calls/0/sampled").json()["tokens"]} == {0}
    rows = client.get("/api/rollouts/deep/rows").json()["rows"]
    assert [row["num_trained"] for row in rows] == [sum(len(t.completion_ids_T) for t in session.turns[1:])]
    row = client.get("/api/rollouts/deep/rows/0").json()
    assert [t["id"] for t in row["tokens"]] == [*session.turns[3].prompt_ids_P, *session.turns[3].completion_ids_T]
    for form in ("rows", "calls"):
        from openenv.core.harness.training import TrainingTrace

        trace = TrainingTrace.model_validate(client.get(f"/api/rollouts/deep/trace?form={form}").json())
        assert len(trace.turns) == (1 if form == "rows" else 4)
    assert "side call: offers no tools" in page_of(client, "/rollouts/deep").text


def test_tokens_are_shown_as_text_where_the_models_tokenizer_is_at_hand(made: MadeRun, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (made.run.internal / "learner.json").write_text(json.dumps({"model_path": str(tmp_path / "model")}))
    ids = tokenizer.encode("<é").ids
    session = Recording("spelt")
    session.ask([user("go")], {"role": "assistant", "content": "hm"})
    session.turns[0].completion_ids_T = [*ids, 2**30]
    session.turns[0].logprobs_T = [-0.1] * 4
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(60, "t", "h")
    add_rollout(made.run, session, group_id=60)
    client = client_of(made.run)
    tokens = client.get("/api/rollouts/spelt/calls/0/sampled").json()["tokens"]
    assert [t["text"] for t in tokens] == ["<", "", "é", "\ufffd"]
    assert "<·é" in page_of(client, "/rollouts/spelt/calls/0/sampled").text
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert client_of(made.run).get("/api/rollouts/spelt/calls/0/sampled").json()["has_texts"] is False


@pytest.mark.parametrize(
    "path",
    ["nope", "g0-0-b/calls/9", "g0-0-b/rows/7", "g0-0-b/files/none", "g0-0-b/calls/1/messages/77", "..%2f..%2fx"],
)
def test_what_is_not_there_is_404_in_its_form(whole: TestClient, path: str) -> None:
    if "messages" not in path:
        page_of(whole, f"/rollouts/{path}", 404)
    if "files" not in path:
        answer = whole.get(f"/api/rollouts/{path}")
        assert answer.status_code == 404 and answer.json()["error"]


def test_a_rollout_that_runs_shows_what_there_is(made: MadeRun) -> None:
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(70, "now", "h")
        store.start_rollout("now", 70, 0, 0)
    client = client_of(made.run)
    page = page_of(client, "/rollouts/now")
    assert "still running" in page.text and "The store holds no calls" in page.text and "No trace" in page.text
    assert 'data-live="1"' in client.get("/rollouts/now").text


def test_the_script_is_valid_and_asks_for_addresses_that_there_are(whole: TestClient) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js")
    done = subprocess.run([node, "--check", str(STATIC / "view.js")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"/api/stamp"' in (STATIC / "view.js").read_text() and whole.get("/api/stamp").json()["stamp"]
    assert "innerHTML" not in (STATIC / "view.js").read_text()


def test_nothing_of_the_run_is_written(made: MadeRun) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = [
            path for path in made.run.path.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))
        ]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = state()
    client = client_of(made.run)
    for path in ("/", "/rollouts", "/groups", "/rollouts/g0-0-b", "/rollouts/g0-0-b/calls/1", "/settings", "/logs"):
        page_of(client, path)
    assert state() == before


def test_an_empty_folder_waits_and_then_shows_the_run(whole_run: MadeRun, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "later")
    client = client_of(run)
    assert client.get("/api/overview").json()["state"] == "waiting"
    for path in ("/", "/rollouts", "/groups", "/settings", "/logs"):
        page_of(client, path)
    whole_run.copy(run.path)
    assert client.get("/api/overview").json()["state"] == "finished"
