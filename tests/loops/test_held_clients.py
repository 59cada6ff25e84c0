"""Environment classes that keep OpenEnv clients: sessions end with their episode, and a lost one is never played on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.loops.base import ROW, EpisodeLost, NoPlace
from harness_trainer.loops.held_clients import session_lost
from harness_trainer.loops.reward_functions import RewardFailed
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rollouts.white_box import run_rollout
from harness_trainer.tasks import Task
from tests.loops.class_playing import PROMPT, called, episode, over, written
from tests.loops.playing import job, play, playing

HEAD = """
from openenv.core import GenericEnvClient
URL = {url!r}
def score(environments, **kwargs):
    return [env.reward for env in environments]
class Env:
    reward = 0.0
"""
PLAY = """
    def reset(self, **kwargs):
        self.client.reset()
    def add(self, number: int, note: str = "") -> str:
        '''Add it.

        Args:
            number: How much
            note: What for
        '''
        result = self.client.step({"number": number, "note": note})
        self.reward = result.reward
        return str(result.observation["total"])
"""
# As people write it: a client in __init__ that nobody closes, its wrapper, one that reset opens, one in a dict.
STYLES = {
    "plain": "    def __init__(self): self.client = GenericEnvClient(base_url=URL)\n" + PLAY,
    "sync": "    def __init__(self): self.client = GenericEnvClient(base_url=URL).sync()\n" + PLAY,
    "lazy": PLAY.replace(
        "self.client.reset()", "self.client = GenericEnvClient(base_url=URL)\n        self.client.reset()"
    ),
    "dict": "    def __init__(self): self.all = {'a': GenericEnvClient(base_url=URL)}\n"
    + PLAY.replace("self.client", "self.all['a']"),
    "async": "    def __init__(self): self.client = GenericEnvClient(base_url=URL)\n"
    + PLAY.replace("def ", "async def ")
    .replace("= self.client", "= await self.client")
    .replace(" self.client.reset", " await self.client.reset"),
}


def adding_machines(live):
    """The app of an OpenEnv server with two places; `live` holds the machines in use."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import field_validator

    class Add(Action):
        number: int
        note: str = ""

        @field_validator("number")
        @classmethod
        def _lucky(cls, value):
            if value == 7:
                raise ValueError("seven is not allowed")
            return value

    class Total(Observation):
        total: int = 0

    class Adder(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.total = 0
            live.add(self)

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.total = 0
            return Total(total=0)

        def step(self, action, timeout_s=None, **kwargs):
            self.total += action.number
            if action.number == 13:
                raise ValueError(f"no such number {action.note}")
            return Total(total=self.total, reward=float(self.total))

        @property
        def state(self):
            return State(episode_id="e", step_count=0)

        def close(self):
            live.discard(self)

    return create_fastapi_app(Adder, Add, Total, max_concurrent_envs=2)


@pytest.fixture(scope="module")
def server():
    """A real OpenEnv server of adding machines: its address, and those in use."""
    import uvicorn

    live = set()
    config = uvicorn.Config(adding_machines(live), host="127.0.0.1", port=0, log_level="error")
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not runner.started:
        assert time.monotonic() < until, "the server is up"
        time.sleep(0.02)
    url = f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    yield url, live
    runner.should_exit = True
    thread.join(30)


async def none_live(live):
    async with asyncio.timeout(20):
        while live:
            await asyncio.sleep(0.01)


def client_threads():
    return [thread for thread in threading.enumerate() if thread.name == "openenv-sync-client-loop"]


@pytest.mark.parametrize("style", STYLES)
async def test_an_episode_ends_its_clients_sessions_and_threads(tmp_path, server, style):
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES[style], "score")
    async with environment:
        for _ in range(3):  # one more than there are places
            async with episode(environment) as one:
                await one.start()
                assert await called(one, "add", number=2) == "2"
                assert await called(one, "add", number=3) == "5"
                assert (await one.rewards(over([]))).total == 5.0
                assert len(live) == 1
            await none_live(live)
    assert client_threads() == []


async def test_what_the_game_refuses_is_the_tools_reply(tmp_path, server):
    environment = written(tmp_path, HEAD.format(url=server[0]) + STYLES["plain"], "score")
    async with environment, episode(environment) as one:
        await one.start()
        with pytest.raises(RuntimeError, match="no such number"):
            await called(one, "add", number=13)
        assert await called(one, "add", number=1) == "14"


async def test_an_action_of_the_wrong_type_is_the_tools_reply(tmp_path, server):
    environment = written(tmp_path, HEAD.format(url=server[0]) + STYLES["plain"], "score")
    async with environment, episode(environment) as one:
        await one.start()
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await called(one, "add", number="many")
        assert await called(one, "add", number=1) == "1"


@pytest.mark.parametrize(
    ("style", "refused"),
    [
        ("plain", {"number": 7}),
        ("sync", {"number": 7}),
        ("async", {"number": 7}),
        ("plain", {"number": 13, "note": "half a pair \ud83d"}),
    ],
)
async def test_an_action_that_the_server_cannot_even_refuse_is_the_policys_fault(tmp_path, server, style, refused):
    """OpenEnv's server ends the session over it (SESSION_ERROR): the episode is over, with what was earned so far."""
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES[style], "score")
    async with environment, episode(environment) as one:
        await one.start()
        await called(one, "add", number=2)
        (add,) = one.tools
        reply = await add.call(refused)
        assert (reply.failed, reply.done, one.done) == (True, True, True)
        assert "invalid" in reply.content
        assert (await one.rewards(over([]))).total == 2.0
    await none_live(live)


async def test_a_reward_that_asks_a_session_that_an_action_ended_is_unknown(tmp_path, server):
    """Its client would be connected to a game that nobody reset: neither that answer counts, nor is it infra."""
    asks = "    def get_reward(self): return float(self.client.step({'number': 1}).reward)\n"
    environment = written(tmp_path, HEAD.format(url=server[0]) + STYLES["plain"] + asks)
    async with environment, episode(environment) as one:
        await one.start()
        await one.tools[0].call({"number": 7})
        with pytest.raises(RewardFailed, match="ended"):
            await one.rewards(over([]))


async def test_a_rollout_with_an_invalid_action_is_scored_and_not_tried_again(tmp_path, server):
    environment = written(tmp_path, HEAD.format(url=server[0]) + STYLES["plain"], "score")
    engine = ScriptedEngine([Reply("", [("add", {"number": 5})]), Reply("", [("add", {"number": 7})])])
    task = Task("game", tmp_path, "Add.", metadata={ROW: {"prompt": PROMPT}})
    result = await play(engine, environment, tmp_path, task=task)
    assert (result.outcome, result.reward) == (Outcome.OK, 5.0), result.detail
    assert (result.tool_calls, result.tool_failures) == ({"add": 2}, {"add": 1})


async def test_a_session_that_was_silently_replaced_is_lost(tmp_path, server):
    """OpenEnv's client connects again without a word: the total would begin at 0."""
    environment = written(tmp_path, HEAD.format(url=server[0]) + STYLES["sync"], "score")
    async with environment, episode(environment) as one:
        await one.start()
        await called(one, "add", number=2)
        client = one._held.instance.client
        await one._held.thread.run(lambda: client._run(client._async._ws.close()))
        with pytest.raises(EpisodeLost, match="connected to a fresh one|ConnectionClosed"):
            await called(one, "add", number=3)
        assert one._held.spoiled


async def test_rollouts_beyond_what_the_server_allows_wait_for_a_place(tmp_path, server):
    """Nobody says how many it allows until it refuses one. None that it refuses is lost."""
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES["plain"], "score")
    row = {ROW: {"prompt": PROMPT}}

    def adds(request) -> Reply:
        over = any(message["role"] == "tool" for message in request.messages)
        return Reply("Done.") if over else Reply("", [("add", {"number": 2})])

    async with playing(ScriptedEngine(adds), environment, tmp_path) as means:
        jobs = [job("Env", f"g0-{n}-a", Task("game", tmp_path, "Add.", metadata=row)) for n in range(7)]
        results = await asyncio.gather(*(run_rollout(each, means) for each in jobs))
        assert environment.max_episodes == 2
    assert [(result.outcome, result.reward) for result in results] == [(Outcome.OK, 2.0)] * 7
    await none_live(live)


@pytest.mark.parametrize("style", STYLES)
async def test_a_server_that_others_fill_is_asked_again_until_patience_is_over(tmp_path, server, style):
    """Its places are taken by sessions that are not of this source, so there is nobody of ours to wait for."""
    from openenv.core import GenericEnvClient

    url, live = server
    others = [GenericEnvClient(base_url=url) for _ in range(2)]
    for other in others:
        await other.reset()
    source = HEAD.format(url=url) + STYLES[style]
    environment = written(tmp_path, source, "score", capacity_patience_s=0.2)
    async with environment:
        async with episode(environment) as one:
            with pytest.raises(EpisodeLost, match="CAPACITY_REACHED"):
                await one.start()
        assert environment.max_episodes == 2 and client_threads() == []
    environment = written(tmp_path, source, "score")
    async with environment, episode(environment) as one:
        starting = asyncio.create_task(one.start())
        await asyncio.sleep(0.3)
        assert not starting.done()
        for other in others:
            await other.close()
        await starting
        assert await called(one, "add", number=2) == "2"
        assert not one._held.spoiled
    await none_live(live)
    assert client_threads() == []


async def test_an_instance_that_waits_for_its_group_holds_no_session(tmp_path, server):
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES["sync"], "score", reward_scope="group")
    async with environment:
        for number in range(3):  # one more than there are places
            async with episode(environment, rollout_id=f"r{number}") as one:
                await one.start()
                await called(one, "add", number=number)
                assert (await one.rewards(over([]))).total is None
            await none_live(live)
        scored = await environment.group_rewards.score(["r2", "r1", "r0"])
        assert [each.scores.total for each in scored] == [2.0, 1.0, 0.0]
        await environment.group_rewards.drop(["r0", "r1"])
    assert client_threads() == []


async def test_a_full_server_says_how_many_it_allows(tmp_path, server):
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES["plain"], "score")
    async with environment, episode(environment) as one, episode(environment) as two, episode(environment) as three:
        await one.start()
        await two.start()
        with pytest.raises(NoPlace, match="CAPACITY_REACHED"):
            await three.start()
        assert environment.max_episodes == 2
    await none_live(live)


async def test_a_server_that_is_gone_loses_the_episode(tmp_path):
    environment = written(tmp_path, HEAD.format(url="http://127.0.0.1:9") + STYLES["plain"], "score")
    async with environment, episode(environment) as one:
        with pytest.raises(EpisodeLost, match="Failed to connect"):
            await one.start()


async def test_a_client_of_the_module_is_nobodys_to_close(tmp_path, server):
    url, live = server
    shared = "SHARED = GenericEnvClient(base_url=URL)\n"
    source = HEAD.format(url=url).replace("class Env", shared + "class Env") + STYLES["plain"].replace(
        "self.client = GenericEnvClient(base_url=URL)", "self.client = SHARED"
    )
    environment = written(tmp_path, source, "score")
    async with environment:
        for _ in range(2):
            async with episode(environment) as one:
                await one.start()
                assert await called(one, "add", number=2) == "2"
        assert len(live) == 1
        client = one._held.instance.client
    await asyncio.to_thread(client._sync_client.close)
    await none_live(live)


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


class SessionLostError(RuntimeError):
    """As OpenEnv 0.12 calls it."""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (raised(SessionLostError("gone")), True),
        (raised(ValueError("over"), SessionLostError("gone")), True),
        (raised(ConnectionRefusedError("of a page that the model asked for")), False),
        (raised(TimeoutError("of a tool's own")), False),
        (raised(RuntimeError("Server error: x (code: SESSION_ERROR)")), False),
        (raised(ValueError("Game over.")), False),
    ],
)
def test_which_errors_mean_a_lost_session(error, lost):
    assert session_lost(error) is lost
