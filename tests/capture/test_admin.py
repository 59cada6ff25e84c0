"""The admin port: minting, sealing, exporting, counting, and who may."""

from pathlib import Path

import httpx
import pytest

from capture_proxy.admin_client import AdminClient
from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.errors import BadRequest, NotFound, UnknownSession
from capture_proxy.types import SessionPolicy
from tests.capture.serving import KEY, served


async def test_minting_again_gives_the_same_session_and_another_policy_is_refused(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        one, two = await gw.mint("a", max_turns=3), await gw.mint("a", max_turns=3)
        assert one == two and one.token.startswith("sk-")
        assert (await gw.mint("b")).token != one.token
        with pytest.raises(BadRequest, match="exists already"):
            await gw.mint("a", max_turns=4)
        await gw.admin.seal("a")
        with pytest.raises(BadRequest, match="exists already"):
            await gw.mint("a", max_turns=3)
        listed = await gw.admin.sessions()
    assert [(s.session_id, s.sealed, s.token) for s in listed] == [("a", True, ""), ("b", False, "")]
    assert listed[0].policy == SessionPolicy(max_turns=3) and listed[0].labels == {"task": "t"}


@pytest.mark.parametrize("session_id", ["", "a/b", "x" * 201, "new\nline"])
async def test_unusable_session_ids_are_refused(tmp_path: Path, session_id: str) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        with pytest.raises(BadRequest, match="session_id"):
            await gw.mint(session_id)


@pytest.mark.parametrize(
    "body",
    [
        {"policy": {"max_turns": 0}},
        {"policy": {"max_tokens": "9"}},
        {"policy": {"surprise": 1}},
        {"policy": {"sampling": []}},
        {"policy": 3},
        {"labels": {"a": 1}},
        {"labels": ["a"]},
    ],
)
async def test_unusable_policies_are_a_400(tmp_path: Path, body: dict[str, object]) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        async with httpx.AsyncClient(base_url=gw.admin_url, headers={"authorization": f"Bearer {KEY}"}) as http:
            response = await http.post("/sessions", json={"session_id": "a", **body})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request_error"


async def test_what_does_not_exist_is_a_404(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        for ask in (gw.admin.capture, gw.admin.seal, gw.admin.session):
            with pytest.raises(NotFound):
                await ask("nobody")


async def test_a_session_id_with_odd_characters_can_be_asked_for(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        await gw.mint("r 1?ü#%2F")
        assert (await gw.admin.capture("r 1?ü#%2F")).turns == []


async def test_without_the_key_only_health_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        for key in ("", "wrong", session.token):
            async with AdminClient(gw.admin_url, key or "x") as stranger:
                with pytest.raises(UnknownSession):
                    await stranger.capture("s1")
                assert await stranger.health()
        engine.up = False
        assert not await gw.admin.health()
        async with httpx.AsyncClient(base_url=gw.admin_url) as http:
            assert (await http.post("/v1/chat/completions", json={})).status_code == 404


async def test_metrics_count_turns_and_tokens(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["four"]), tmp_path / "s.sqlite") as gw:
        user = [{"role": "user", "content": "hi"}]
        await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=user)
        stats = await gw.admin.stats()
        async with httpx.AsyncClient(base_url=gw.admin_url, headers={"authorization": f"Bearer {KEY}"}) as http:
            text = (await http.get("/metrics")).text
    assert stats["turns"] == {"ok": 1, "aborted": 0, "failed": 0}
    assert stats["completion_tokens"] == 5 and stats["in_flight"] == 0 and stats["live_sessions"] == 1
    assert (
        'capture_turns_total{status="ok",dialect="openai_chat"} 1' in text
        and "capture_completion_tokens_total 5" in text
    )


async def test_events_of_a_session_are_kept_beside_its_turns(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with httpx.AsyncClient(base_url=gw.admin_url, headers={"authorization": f"Bearer {KEY}"}) as http:
            event = {"session_token": session.token, "kind": "refused_host", "detail": "example.org:443"}
            assert (await http.post("/events", json=event)).status_code == 201
            assert (await http.post("/events", json={"kind": "refused_host", "detail": "x"})).status_code == 201
            for bad, status in (
                ({"session_id": "s1", "kind": ""}, 400),
                ({"session_id": "s1", "kind": 3}, 400),
                ({"session_id": "s1", "kind": "k", "detail": []}, 400),
                ({"session_id": "nobody", "kind": "k"}, 404),
                ({"session_token": "sk-wrong", "kind": "k"}, 404),
            ):
                assert (await http.post("/events", json=bad)).status_code == status, bad
        await gw.admin.put_event("note", "by id", session_id="s1")
        events = await gw.admin.events("s1")
        await gw.admin.seal("s1")
        sealed = await gw.admin.events("s1")
    assert [(e["kind"], e["detail"]) for e in events] == [("refused_host", "example.org:443"), ("note", "by id")]
    assert events == sealed and events[0]["at"] > 1e9


async def test_a_trace_is_openenvs(tmp_path: Path) -> None:
    from openenv.core.harness.training import TrainingTrace

    async with served(ScriptedEngine(["four"]), tmp_path / "s.sqlite") as gw:
        user = [{"role": "user", "content": "hi"}]
        await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=user)
        data = await gw.admin.trace("s1")
        with pytest.raises(NotFound):
            await gw.admin.trace("nobody")
    (turn,) = TrainingTrace.model_validate(data).turns
    assert bytes(turn.completion_token_ids[:-1]) == b"four" and sum(turn.loss_mask) == 5


async def test_metrics_are_in_prometheus_text_form(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["four"]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as agent:
            user = [{"role": "user", "content": "hi"}]
            for body in ({"messages": user}, {"messages": user, "n": 2}, {"messages": user, "stream": True}):
                await agent.post("/v1/chat/completions", json=body)
        async with httpx.AsyncClient(base_url=gw.admin_url, headers={"authorization": f"Bearer {KEY}"}) as http:
            response = await http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text.endswith("\n") and "\n\n" not in response.text
    samples: dict[str, float] = {}
    typed: dict[str, str] = {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split(" ")
            assert name not in typed
            typed[name] = kind
        elif not line.startswith("# HELP"):
            name, value = line.rsplit(" ", 1)
            assert name not in samples
            samples[name] = float(value)
    names = {name.partition("{")[0] for name in samples}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    assert families <= set(typed)  # what has never been counted is announced alone
    assert samples['capture_turns_total{status="ok",dialect="openai_chat"}'] == 2
    assert samples['capture_refused_total{code="invalid_request_error"}'] == 1
    for name in ("capture_call_seconds", "capture_first_token_seconds", "capture_commit_seconds"):
        buckets = [v for k, v in samples.items() if k.startswith(f"{name}_bucket")]
        assert typed[name] == "histogram" and buckets == sorted(buckets)
        assert samples[f'{name}_bucket{{le="+Inf"}}'] == samples[f"{name}_count"] == 2
        assert samples[f"{name}_sum"] > 0


def test_label_values_are_escaped() -> None:
    from capture_proxy.metrics import Counter

    counter = Counter("x_total", "a\nb\\", "code")
    counter.add('say "no"\n\\')
    assert list(counter.lines()) == [
        "# HELP x_total a\\nb\\\\",
        "# TYPE x_total counter",
        'x_total{code="say \\"no\\"\\n\\\\"} 1',
    ]
