"""The main clauses of the contract against a real vLLM with a tiny random model, one server for the module."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.types import TurnStatus
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.launch import Engine
from harness_trainer.errors import SetupError
from tests.capture.serving import until
from tests.engine.tiny_model import make_tiny_model
from tests.proof.audit import audit
from tests.proof.gateways import BASH, DIALECTS, bench, opened

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("dialect", DIALECTS)]
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1)
    try:
        find_environment(config)
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model")
    with Engine(config, model=model, log_path=folder / "engine.log", registry=folder / "owned") as engine:
        yield engine.base_url


@pytest.mark.parametrize("transport", ["generate", "chat"])
async def test_streamed_whole_and_recorded_are_one_reply(
    tmp_path: Path, url: str, dialect: str, transport: str
) -> None:
    async with bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
        forms = []
        for stream in (True, False):
            agent = await b.agent(f"stream-{stream}", tools=[BASH], max_tokens=40, sampling=GREEDY)
            agent.system = "You are a coding agent."
            said = await agent.say("Write a poem é🙂.").ask(stream)
            capture = await b.capture(f"stream-{stream}")
            (turn,) = capture.turns
            assert (turn.message.get("content") or "") == said.text
            assert said.usage == (len(turn.prompt_ids_P), len(turn.completion_ids_T))
            assert turn.trainable, turn.findings
            forms.append((said.form, list(turn.prompt_ids_P), list(turn.completion_ids_T)))
            audit(capture)
    assert forms[0] == forms[1]
    assert forms[0][0][3] in ("length", "stop") and len(forms[0][2]) <= 40


async def test_each_prompt_of_a_conversation_is_as_long_as_counted(tmp_path: Path, url: str, dialect: str) -> None:
    async with bench(dialect, VllmEngine(url), tmp_path) as b:
        agent = (await b.agent(max_tokens=12, sampling=GREEDY)).say("One.")
        for stream in (True, False, True):
            counted = await agent.count() if dialect != "openai_chat" else None
            said = await agent.ask(stream)
            assert counted in (None, said.usage[0])
            agent.echo(said).say("And on.")
        capture = await b.capture()
    assert len(capture.turns) == 3 and all(turn.trainable for turn in capture.turns)
    audit(capture)


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_frees_the_engine(tmp_path: Path, url: str, dialect: str, stream: bool) -> None:
    async with bench(dialect, VllmEngine(url), tmp_path) as b:
        agent = (await b.agent(sampling={"temperature": 1.0}, max_tokens=3500)).say("Talk.")
        async with opened(b.gateway.agent_url, agent.wire(stream)):
            await until(lambda: b.gateway.gateway.sessions.num_in_flight == 1)
            await asyncio.sleep(0.3)
        start = time.monotonic()
        await until(lambda: b.gateway.gateway.sessions.num_in_flight == 0)
        assert time.monotonic() - start < 2
        capture = await b.capture()
    if capture.turns[0].finish_reason is None:  # a random model may have ended by itself in that time
        assert capture.turns[0].status is TurnStatus.ABORTED
    audit(capture)


async def test_a_prompt_beyond_the_window_is_400(tmp_path: Path, url: str, dialect: str) -> None:
    async with bench(dialect, VllmEngine(url), tmp_path) as b:
        agent = (await b.agent()).say("word " * 20_000)
        with pytest.raises(agent.error_types) as caught:
            await agent.ask(True)
        assert 400 in (getattr(caught.value, "status_code", None), getattr(caught.value, "code", None))
        assert (await b.gateway.admin.session("s1")).limit_hit == "context_length"
        audit(await b.capture())
