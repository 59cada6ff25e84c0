"""A store of schema 1 becomes one of schema 2 in place, whole or not at all."""

import asyncio
import math
import signal
import sqlite3
import subprocess
import sys
from array import array
from pathlib import Path

import orjson
import pytest

from capture_proxy import codec
from capture_proxy.errors import StoreError
from capture_proxy.store import SCHEMA_VERSION, Store
from capture_proxy.types import Session, SessionPolicy, Turn
from tests.capture.recording import TOOLS_MANY, Recording, system, user

SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE capture_sessions (
    session_id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE, created_at REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE capture_turns (
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, turn_index INTEGER NOT NULL, body BLOB NOT NULL,
    prompt_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    UNIQUE (session_id, turn_index));
INSERT INTO meta VALUES ('capture_schema', '1');
CREATE TABLE rollouts (x);
INSERT INTO rollouts VALUES (7);
"""


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, list[Turn]]:
    """A file as schema 1 wrote it, before turns had hashes or bridges, with two sessions."""
    path, turns = tmp_path / "s.sqlite", []
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA_1)
        for name in ("a", "b"):
            session = Session(name, f"token-{name}", SessionPolicy(), {}, created_at=1.0)
            body = codec.session_to_dict(session)
            del body["policy"]["max_total_tokens"]
            db.execute("INSERT INTO capture_sessions VALUES (?, ?, 1.0, ?)", (name, session.token, orjson.dumps(body)))
            recording = Recording(name)
            recording.work([system("x" * 400), user("go")], 12, offered=TOOLS_MANY)
            recording.turns[3].logprobs_T[0] = None
            for turn in recording.turns:
                data = {**codec.body_to_dict(turn), "request": turn.request}
                for later in ("body_hash", "bridged_from", "bridge_refusal", "stop_sequence"):
                    data.pop(later, None)
                arrays = (array("i", turn.prompt_ids_P), array("i", turn.completion_ids_T))
                logprobs = array("d", [math.nan if x is None else x for x in turn.logprobs_T])
                row = (turn.turn_id, name, turn.index, orjson.dumps(data), *(a.tobytes() for a in (*arrays, logprobs)))
                db.execute("INSERT INTO capture_turns VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            turns += recording.turns
    return path, turns


async def everything(path: Path) -> list[Turn]:
    store = Store.open(path)
    try:
        return [turn for session in await store.sessions() for turn in await store.turns(session.session_id)]
    finally:
        await store.close()


def schema_of(path: Path) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("SELECT value FROM meta WHERE key = 'capture_schema'").fetchone()[0])


async def test_every_turn_of_an_old_file_is_there_after_it_was_opened(old: tuple[Path, list[Turn]]) -> None:
    path, turns = old
    assert await everything(path) == turns
    assert schema_of(path) == SCHEMA_VERSION == 2
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT x FROM rollouts").fetchall() == [(7,)]
        assert db.execute("SELECT name FROM sqlite_master WHERE name = 'capture_turns_1'").fetchall() == []
        new = [n for (n,) in db.execute("SELECT LENGTH(prompt_ids) FROM capture_turns WHERE session_id = 'a'")]
    assert max(new[1:]) < new[0] / 4, "what was whole is told in terms of the turn before"


async def test_a_migrated_session_goes_on(old: tuple[Path, list[Turn]]) -> None:
    path, turns = old
    more = Recording("a")
    more.turns = [turn for turn in turns if turn.session_id == "a"]
    more.ask([system(), user("again")], {"role": "assistant", "content": "yes"})
    store = Store.open(path)
    await store.put_turn(more.turns[-1], more.session)
    assert await store.turns("a") == more.turns
    await store.close()


KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
from capture_proxy import migrations

class Killed(sqlite3.Connection):
    def execute(self, sql, *args):
        if sys.argv[2] in sql:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(sql, *args)

db = sqlite3.connect(sys.argv[1], isolation_level=None, factory=Killed)
db.execute("PRAGMA journal_mode=WAL")
db.execute("PRAGMA cache_size=5")  # so that pages of the unfinished transaction are on the disk
migrations.prepare(db, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("at", ["CREATE INDEX", "DROP TABLE", "INSERT OR REPLACE INTO meta", "COMMIT"])
async def test_kill_9_in_the_middle_leaves_the_file_as_it_was(old: tuple[Path, list[Turn]], at: str) -> None:
    path, turns = old
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, str(path), at], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert schema_of(path) == 1
    assert await everything(path) == turns


async def test_two_programs_that_open_an_old_file_at_once_both_find_it_whole(old: tuple[Path, list[Turn]]) -> None:
    path, turns = old
    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, everything(path)) for _ in range(3)))
    assert all(each == turns for each in found)


async def test_a_newer_file_is_refused_in_one_line_and_left_alone(old: tuple[Path, list[Turn]]) -> None:
    path, _ = old
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '3' WHERE key = 'capture_schema'")
    with pytest.raises(StoreError, match="schema 3, this program knows 2: use the newer"):
        Store.open(path)
    assert schema_of(path) == 3
