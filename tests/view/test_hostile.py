"""What models, agents and tests say is text and nothing else; what is secret is not shown."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome
from harness_trainer.view.kept import read_part
from harness_trainer.view.settings import shown, without_secrets
from harness_trainer.view.visible import to_json, visible
from tests.audit.made_run import MadeRun
from tests.capture.recording import Recording, reply, user
from tests.view.conftest import add_rollout, client_of, page_of

SCRIPT = "</pre></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;{{ 7*7 }}"
BIDI = "a\u202eb\u2066c\u200bd\u061c"
NASTY = SCRIPT + BIDI + "\x00\x1b[31m\x7f" + "\ufeff"


@pytest.fixture(scope="module")
def nasty(whole_run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MadeRun, TestClient]]:
    made = whole_run.copy(tmp_path_factory.mktemp("nasty") / NASTY.replace("/", "").replace("\x00", "")[:40])
    session = Recording("n1")
    session.session.token = "sk-token-of-the-session"
    parts = [{"type": "text", "text": NASTY}, {"type": "image_url", "image_url": {"url": SCRIPT}}]
    tool = {"role": "tool", "tool_call_id": "c", "content": "key: sk-token-of-the-session " + NASTY}
    session.ask(
        [user(NASTY), {"role": "user", "content": parts}, tool],
        reply(NASTY, (NASTY, {"command": NASTY}), reasoning=NASTY),
        model=NASTY,
        offered=[{"type": "function", "function": {"name": NASTY}}],
    )
    odd = [
        {"odd": NASTY},
        {"role": NASTY, "content": {"a": [NASTY, 7, None]}},
        NASTY,
        7,
        {"role": 7, "tool_calls": [NASTY, {}]},
    ]
    session.ask([user("x" * 3_000_000), *odd], reply("ok"), ids=False)
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(60, NASTY.replace("\ufeff", ""), NASTY)
        store.tell("odd", NASTY)
        store.set_state("runner_error", NASTY + " sk-0123456789abcdef")
    add_rollout(
        made.run, session, group_id=60, task=NASTY, harness=NASTY, outcome=Outcome.AGENT_FAILED,
        detail=NASTY + " sk-token-of-the-session", findings=[NASTY], rewards={NASTY: 0.5}, tool_calls={NASTY: 1},
        facts={NASTY: 1.0}, stages_s={NASTY: 1.0}, failed_stage=NASTY,
    )  # fmt: skip
    folder = made.run.artifacts / "n1"
    folder.mkdir()
    name = SCRIPT.replace("/", "-")[:60] + "\u202e.log"
    (folder / name).write_bytes(b"\xff\xfe" + NASTY.encode())
    (folder / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    (folder / "verifier.log").write_bytes(NASTY.encode() + b" sk-token-of-the-session \xed\xa0\x80")
    (folder / "passwd").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe")
    with made.run.events.open("a") as file:
        file.write(
            json.dumps({"kind": "restart", "part": NASTY, "last_line": NASTY, "time": 1e300, "exit_code": NASTY}) + "\n"
        )
    made.run.logs.mkdir()
    (made.run.logs / "engine.log").write_text(NASTY + " sk-0123456789abcdef", errors="replace")
    with client_of(made.run) as client:
        yield made, client


PAGES = ("/", "/rollouts", "/groups", "/logs", "/logs/engine.log", "/rollouts/n1", "/rollouts/n1/calls/0",
         "/rollouts/n1/calls/1", "/rollouts/n1/calls/0?whole=1&fragment=1", "/rollouts/n1/calls/0/sampled",
         "/rollouts/n1/calls/0/prompt", "/rollouts/n1/rows/0", "/rollouts/n1/files/verifier.log")  # fmt: skip


WITHOUT_TEXTS = ("/logs", "/rollouts/n1/calls/0/sampled", "/rollouts/n1/calls/0/prompt", "/rollouts/n1/rows/0")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_well_formed_and_holds_nothing_of_theirs_but_text(
    nasty: tuple[MadeRun, TestClient], path: str
) -> None:
    page = page_of(nasty[1], path)  # which knows every script and every attribute
    raw = nasty[1].get(path).text
    assert "<script>alert" not in raw and "<img" not in raw
    assert "{{ 7*7 }}" in page.text or path in WITHOUT_TEXTS
    assert not set(raw) & set("\x00\x1b\x7f\u202e\u2066\u200b\ufeff\u061c")
    assert "sk-token-of-the-session" not in raw and "sk-0123456789abcdef" not in raw


def test_every_link_to_a_file_opens_it_and_no_other_is_listed(nasty: tuple[MadeRun, TestClient]) -> None:
    links = [link for link in page_of(nasty[1], "/rollouts/n1").links if "/files/" in link]
    assert [nasty[1].get(link).status_code for link in links].count(200) == 2 and len(links) == 3
    for name in ("passwd", "up/g0-0-b/x", "pipe", "%2e%2e/g0-0-b", "../../config.yaml", "a%00b", ""):
        assert nasty[1].get(f"/rollouts/n1/files/{name}").status_code == 404, name


@pytest.mark.parametrize("path", ["", "/calls", "/calls/0", "/calls/0/messages/reply", "/calls/0/messages/2", "/rows",
                                  "/trace", "/trace?form=calls"])  # fmt: skip
def test_answers_are_json_and_keep_the_sessions_token(nasty: tuple[MadeRun, TestClient], path: str) -> None:
    answer = nasty[1].get(f"/api/rollouts/n1{path}")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    json.loads(answer.content)
    assert answer.content.isascii() and b"sk-token-of-the-session" not in answer.content


def test_a_long_message_is_shown_in_part_and_read_on(nasty: tuple[MadeRun, TestClient]) -> None:
    call = nasty[1].get("/api/rollouts/n1/calls/1").json()
    first = call["messages"][0]
    assert first["is_cut"] and first["total"] == 3_000_000 and len(first["text"]) == 2000
    assert len(nasty[1].get("/rollouts/n1/calls/1").content) < 40_000
    end, got = len(first["text"]), 2000
    while end < first["total"]:
        part = nasty[1].get(f"/api/rollouts/n1/calls/1/messages/0?offset={end}").json()
        assert part["start"] == end and part["end"] > end
        end, got = part["end"], got + len(part["text"])
    assert got == 3_000_000
    for offset in ("-1", "x", "1e3", "9" * 30):
        assert nasty[1].get(f"/api/rollouts/n1/calls/1/messages/0?offset={offset}").status_code == 400


def test_a_long_file_is_shown_in_whole_lines(tmp_path: Path) -> None:
    """So that a secret is in one piece for whoever masks it."""
    line = b"x" * 99 + b"\n"
    (tmp_path / "log").write_bytes(line * 5000)
    tail = read_part(tmp_path, "log")
    assert tail.end == tail.size == 500_000 and len(tail.text) % 100 == 0 and tail.text.startswith("x" * 99)
    at, got = 0, ""
    while at < tail.size:
        part = read_part(tmp_path, "log", at)
        at, got = part.end, got + part.text
    assert got.encode() == line * 5000
    (tmp_path / "one").write_bytes(b"y" * 450_000)
    assert read_part(tmp_path, "one", 0).end == 200_000, "a line that is too long for that is cut"


@pytest.mark.parametrize("word", ["a", "-", "key", "://", "sk-", "bearer ", "hf_"])
def test_a_log_of_one_long_word_is_looked_through_at_once(word: str) -> None:
    text = word * (200_000 // len(word))
    started = time.process_time()
    without_secrets(text)
    assert time.process_time() - started < 1.0


def test_what_is_not_there_is_named_with_where_to_look(nasty: tuple[MadeRun, TestClient]) -> None:
    for path in ("/logs/none.log", "/rollouts/n1/files/none", "/rollouts/n1/files/passwd"):
        page = page_of(nasty[1], path, 404)
        assert f"{path.rpartition('/')[2]}: " in page.text and "lists what was kept" in page.text


def test_a_fault_of_the_viewers_own_is_told_on_the_page_and_in_its_terminal(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RecursionError("of a library")

    monkeypatch.setattr("harness_trainer.view.attempts.rollouts", fails)
    client = client_of(made.run)
    assert "the viewer failed (RecursionError)" in page_of(client, "/rollouts", 500).text
    assert "RecursionError" in client.get("/api/rollouts").json()["error"]
    assert "/rollouts failed in an unforeseen way" in caplog.text and "of a library" in caplog.text


def test_texts_that_no_encoding_takes_are_signs_everywhere() -> None:
    text = visible("a\ud800b\x00c\u202ed\r\n\t")
    assert text == "a⟨U+D800⟩b␀c⟨U+202E⟩d␍\n\t" and visible(text) == text
    answer = to_json({"a\ud800": ["\udfff", float("inf"), 1]})
    assert json.loads(answer) == {"a\ud800": ["\udfff", None, 1]}


def test_a_lone_surrogate_in_a_message_does_not_break_a_page(made: MadeRun) -> None:
    session = Recording("lone")
    session.ask([user("hello")], reply("there"))
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(60, "t", "h")
    add_rollout(made.run, session, group_id=60)
    client = client_of(made.run)
    from harness_trainer.view.messages import message
    from jobs.masking import Mask

    turn = session.turns[0]
    turn.request["messages"] = [user("a\ud800b")]  # JSON has it as \ud800; the store's encoder would refuse it
    assert message(turn, "0", Mask([])).text == "a⟨U+D800⟩b"
    page_of(client, "/rollouts?task=%ED%A0%80")
    page_of(client, "/rollouts/%ED%A0%80", 404)


def test_a_session_of_hundreds_of_calls_with_long_outputs_stays_usable(made: MadeRun) -> None:
    """300 calls, each with the whole history; every tenth tool answers with a megabyte."""
    session = Recording("long")
    history = [user("go")]
    for n in range(300):
        history.append(session.ask(history, reply(f"step {n}", ("bash", {"command": f"ls {n}"})), ids=False))
        history.append(
            {"role": "tool", "tool_call_id": "c0", "content": f"out {n} " + "y" * (10**6 if n % 10 == 0 else 10)}
        )
    with closing(RolloutStore(made.run.store)) as store:
        store.open_group(60, "t", "h")
    add_rollout(made.run, session, group_id=60)
    client = client_of(made.run)
    page_of(client, "/rollouts/long")  # decodes it once
    started = time.process_time()
    assert len(client.get("/rollouts/long").content) < 400_000
    last = client.get("/rollouts/long/calls/299?fragment=1")
    assert time.process_time() - started < 2.0
    assert last.status_code == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"api_key": "abcdefgh", "token_env": "HF_TOKEN", "reward_key": "pass"},
         {"api_key": "***", "token_env": "HF_TOKEN", "reward_key": "pass"}),
        ({"extra_args": ["--api-key", "abc", "--x", "y"]}, {"extra_args": ["--api-key", "***", "--x", "y"]}),
        ({"url": "https://me:pw@host/x?access_token=abc&b=1"}, {"url": "https://***@host/x?access_token=***&b=1"}),
        ({"command": "tunnel run --token eyJhIjoi --port 7"}, {"command": "tunnel run --token *** --port 7"}),
        ({"note": "use hf_abcdefghijklmnop now"}, {"note": "use *** now"}),
        ({"token_budget": 4096, "password": None}, {"token_budget": 4096, "password": None}),
        ({"command": "tunnel my-own-secret"}, {"command": "tunnel ***"}),
    ],
)  # fmt: skip
def test_settings_are_shown_without_secrets(given: object, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNNEL_TOKEN", "my-own-secret")
    assert shown(given) == expected


def test_the_settings_page_shows_what_is_no_secret(made: MadeRun) -> None:
    made.settings("engine", extra_args=["--api-key", "very-secret-key"])
    page = page_of(client_of(made.run), "/settings")
    assert "group_size: 2" in page.text and "very-secret-key" not in page.text and "'***'" in page.text
