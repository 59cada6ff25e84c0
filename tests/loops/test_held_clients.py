"""Environment classes that keep OpenEnv clients: sessions end with their episode, and a lost one is never played on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from harness_trainer.loops.base import EpisodeLost
from harness_trainer.loops.held_clients import session_lost
from tests.loops.class_playing import called, episode, over, written

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
    def add(self, number: int) -> str:
        '''Add it.

        Args:
            number: How much
        '''
        result = self.client.step({"number": number})
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


@pytest.fixture(scope="module")
def server():
    """A real OpenEnv server of adding machines, with two places; `live` holds those in use."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        number: int

    class Total(Observation):
        total: int = 0

    live = set()

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
                raise ValueError("no such number")
            return Total(total=self.total, reward=float(self.total))

        @property
        def state(self):
            return State(episode_id="e", step_count=0)

        def close(self):
            live.discard(self)

    app = create_fastapi_app(Adder, Add, Total, max_concurrent_envs=2)
    runner = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
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


async def test_a_full_server_loses_the_episode(tmp_path, server):
    url, live = server
    environment = written(tmp_path, HEAD.format(url=url) + STYLES["plain"], "score")
    async with environment, episode(environment) as one, episode(environment) as two, episode(environment) as three:
        await one.start()
        await two.start()
        with pytest.raises(EpisodeLost, match="CAPACITY_REACHED|capacity|ConnectionClosed"):
            await three.start()
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
