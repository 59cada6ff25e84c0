"""What the store promises: durable, shared with others, and honest when it cannot."""

import asyncio
import itertools
import sqlite3
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import StoreError
from capture_proxy.store import SCHEMA_VERSION, Store
from capture_proxy.types import Session, SessionPolicy
from tests.capture.serving import served
from tests.capture.test_graph import turn

USER = [{"role": "user", "content": "hi"}]


async def test_a_turn_comes_back_as_it_went_in(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "sub" / "s.sqlite")
    session = Session("s", "tok", SessionPolicy(sampling={"top_p": 0.5}, deadline=9.5), {"a": "b"}, created_at=1.5)
    kept = turn(0, [1, 2**31 - 1], [3, 4])
    kept.logprobs_T = [None, -0.1]
    await store.put_turn(kept, session)
    assert await store.turns("s") == [kept]
    assert await store.session_by_token("tok") == session
    assert await store.session_by_token("other") is None
    await store.close()
    await store.close()
    with pytest.raises(StoreError):
        await store.turns("s")


async def test_a_newer_schema_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    await Store.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'capture_schema'", (str(SCHEMA_VERSION + 1),))
    with pytest.raises(StoreError, match=str(SCHEMA_VERSION + 1)):
        Store.open(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.write_text("this is not a database, but it is long enough to be read as a header" * 20)
    with pytest.raises(StoreError, match="cannot open"):
        Store.open(path)


async def test_other_tables_of_the_file_are_left_alone_and_other_writers_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = Store.open(path)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE rollouts (x)")
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO rollouts VALUES (1)")
    write = asyncio.create_task(store.put_session(Session("s", "t", SessionPolicy(), {})))
    await asyncio.sleep(0.05)
    assert not write.done()
    other.execute("COMMIT")
    await write
    assert other.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
    other.close()
    await store.close()


async def test_concurrent_turns_share_transactions_and_one_bad_write_fails_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.sqlite")
    session = Session("s", "t", SessionPolicy(), {})
    turns = [turn(i, [1], [2]) for i in range(50)]
    turns[20].index = 19  # taken by its neighbour
    results = await asyncio.gather(*(store.put_turn(t, session) for t in turns), return_exceptions=True)
    assert [i for i, r in enumerate(results) if r is not None] == [20]
    assert isinstance(results[20], StoreError)
    assert len(await store.turns("s")) == 49
    await store.close()


async def test_what_utf_8_cannot_hold_is_refused_to_its_writer_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.sqlite")
    session, bad = Session("s", "t", SessionPolicy(), {}), turn(0, [1], [2])
    bad.message = {"role": "assistant", "content": "\ud83d"}
    odd = Session("s2", "t2", SessionPolicy(), {}, last_fault="\ud83d")
    good = turn(1, [1], [2])
    writes = (
        store.put_turn(bad, session),
        store.put_event("s", "refused", "\ud83d"),
        store.put_session(odd),
        store.put_turn(good, session),
    )
    *failed, kept = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(failure) for failure in failed] == [StoreError] * 3 and kept is None
    assert [each.turn_id for each in await store.turns("s")] == [good.turn_id]
    await store.close()


async def test_what_follows_a_turn_at_once_is_not_undone_by_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.sqlite")
    session = Session("s", "t", SessionPolicy(), {})
    writing = asyncio.create_task(store.put_turn(turn(0, [1], [2]), session))
    await asyncio.sleep(0)  # handed over, not written yet
    session.sealed = True
    await store.put_session(session)
    await writing
    kept = await store.session("s")
    assert kept is not None and kept.sealed
    await store.close()


async def test_a_turn_handed_over_before_the_end_is_written(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.sqlite")
    writing = asyncio.create_task(store.put_turn(turn(0, [1], [2]), Session("s", "t", SessionPolicy(), {})))
    await asyncio.sleep(0)
    await store.close()
    await writing
    store = Store.open(tmp_path / "s.sqlite")
    assert len(await store.turns("s")) == 1
    await store.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_on_a_full_disk_the_agent_gets_an_error_never_a_lost_turn(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "s.sqlite"
    async with served(ScriptedEngine([Reply("text", [("bash", {})])]), path) as gw:
        session = await gw.mint()
        gw.gateway.store._writer.execute("PRAGMA max_page_count = 1")  # SQLite's own way to say SQLITE_FULL
        async with gw.http(session) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 50_000}], "stream": stream}
            response = await http.post("/v1/chat/completions", json=body)
        assert "store_error" in response.text and "full" in response.text
        assert "[DONE]" not in response.text and "tool_calls" not in response.text
        assert response.status_code == (200 if stream else 507)
        assert (await gw.admin.capture("s1")).turns == []
        gw.gateway.store._writer.execute("PRAGMA max_page_count = 1000000")
        assert (await gw.openai(session).chat.completions.create(model="m", messages=USER)).choices


async def test_32_sessions_at_once_never_mix(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda r: Reply(["echo ", r.messages[-1]["content"]]), piece_delay_s=0.001)
    async with served(engine, tmp_path / "s.sqlite") as gw:

        async def agent(name: str) -> None:
            session = await gw.mint(name)
            history: list[dict[str, str]] = []
            async with gw.http(session) as http:
                for i in range(3):
                    history.append({"role": "user", "content": f"{name} {i}"})
                    body = {"model": "m", "messages": history}
                    reply = (await http.post("/v1/chat/completions", json=body, timeout=60)).json()
                    history.append(reply["choices"][0]["message"])
                    assert history[-1]["content"] == f"echo {name} {i}"

        await asyncio.gather(*(agent(f"r{n}") for n in range(32)))
        for n in range(32):
            turns = (await gw.admin.capture(f"r{n}")).turns
            assert [t.message["content"] for t in turns] == [f"echo r{n} {i}" for i in range(3)]
            for before, after in itertools.pairwise(turns):
                whole = before.prompt_ids_P + before.completion_ids_T
                assert after.prompt_ids_P[: len(whole)] == whole
        assert (await gw.admin.stats())["in_flight"] == 0
