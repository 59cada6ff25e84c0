"""What goes wrong with OpenEnv servers: a lost session is never played on, and a place is never held for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.environments import OpenEnvConfig
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, NoPlace
from harness_trainer.loops.places import Places
from harness_trainer.rollouts.config import RolloutConfig, SourceSpec
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rollouts.white_box import run_rollout
from harness_trainer.rollouts.white_box_run import open_white_box
from tests.loops.openenv_serving import (
    ADDING,
    ENVS,
    DeafRelay,
    called,
    environment,
    none_left,
    num_sessions,
    served,
    task,
)
from tests.loops.playing import job, model_side, play, playing

QUICK = {"ping_interval_s": 0.3, "ping_timeout_s": 0.3}
NO_PINGS = {"ping_interval_s": None, "ping_timeout_s": None}

HOLDER = """
import asyncio, sys
from openenv.core import GenericEnvClient
async def main():
    client = GenericEnvClient(base_url=sys.argv[1])
    await client.connect()
    await client.reset()
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def full_url(tmp_path_factory):
    """A server with two places, which looks for vanished peers often."""
    folder = tmp_path_factory.mktemp("full")
    context = served(folder, ADDING, max_episodes=2, **QUICK)
    with asyncio.Runner() as runner:
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def deaf_url(tmp_path_factory):
    """A server that sends no pings and ends sessions that are silent for two seconds."""
    folder = tmp_path_factory.mktemp("deaf")
    context = served(folder, ADDING, idle_timeout_s=2.0, **NO_PINGS)
    with asyncio.Runner() as runner:
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


async def holder(url):
    """A process that holds a session."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, url, stdout=asyncio.subprocess.PIPE, env={**os.environ, "NO_PROXY": "*"}
    )
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"held\n"
    return process


async def test_peers_that_vanish_hold_no_place(tmp_path, full_url):
    """B41: one client stopped after its reset, half open; another killed; the third is served."""
    stopped, killed = await asyncio.gather(holder(full_url), holder(full_url))
    try:
        stopped.send_signal(signal.SIGSTOP)
        assert await num_sessions(full_url) == 2
        killed.kill()
        async with environment(tmp_path, full_url, capacity_patience_s=30) as adding:
            async with adding.episode(task(), "a") as one, adding.episode(task(), "b") as two:
                for each in (one, two):
                    await each.start()
                    assert '"total": 1' in (await called(each, "add", number=1)).content
    finally:
        stopped.kill()
        await asyncio.gather(stopped.wait(), killed.wait())
    await none_left(full_url)


async def test_a_full_server_is_waited_for_then_the_episode_is_lost(tmp_path, full_url):
    others = environment(tmp_path, full_url)
    ours = environment(tmp_path, full_url, capacity_patience_s=1.0)
    await none_left(full_url)
    async with others, ours:
        await none_left(full_url)
        async with others.episode(task(), "a"), others.episode(task(), "b"):
            began = time.monotonic()
            with pytest.raises(EpisodeLost, match="no place left"):
                async with ours.episode(task(), "c"):
                    pass
            assert 0.9 < time.monotonic() - began < 20
            soon = asyncio.create_task(_one_step(ours))
            await asyncio.sleep(0.2)
        assert '"total": 1' in await soon, "a place that comes free in time is taken"
        assert ours.max_episodes == 2, "the refusal named the limit"
    await none_left(full_url)


async def _one_step(adding):
    async with adding.episode(task(), "r") as one:
        await one.start()
        return (await called(one, "add", number=1)).content


def adds(request) -> Reply:
    over = any(message["role"] == "tool" for message in request.messages)
    return Reply("Done.") if over else Reply("", [("add", {"number": 1})])


async def test_two_sources_of_one_server_share_its_places(tmp_path, full_url):
    """Each would be refused while the other has both, and would give up."""
    await none_left(full_url)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Add."}))
    env = OpenEnvConfig(target=full_url, unrewarded=0.0, capacity_patience_s=1.0, max_episodes=2)
    config = RolloutConfig(max_tokens=2048, timeout_s=20.0)
    async with contextlib.AsyncExitStack() as stack:
        scripted = ScriptedEngine(adds, first_delay_s=0.5)
        side = await stack.enter_async_context(model_side(scripted, tmp_path / "store.sqlite"))
        places: dict[str, Places] = {}
        sources = []
        for name in ("plain", "hard"):
            spec = SourceSpec(name=name, config=config, env=env, tasks=str(rows), harness="adding")
            sources.append(await open_white_box(stack, spec, side, places))
        jobs = [job("adding", f"g{n}-{source.name}", source.tasks[0]) for source in sources for n in range(4)]
        results = await asyncio.gather(*(sources[n // 4].attempt(each) for n, each in enumerate(jobs)))
    assert [(result.outcome, result.detail) for result in results] == [(Outcome.OK, "")] * 8
    await none_left(full_url)


async def test_more_rollouts_than_places_take_turns_and_none_waits_on_its_own_time(tmp_path, full_url):
    """The limit (2) is learned from the first refusal, when twelve are open; their games outlast `create`'s limit."""
    await none_left(full_url)
    adding = environment(tmp_path, full_url, unrewarded=0.0)
    slow = {"start_timeout_s": 2.0, "timeout_s": 20.0}
    async with playing(ScriptedEngine(adds, first_delay_s=0.4), adding, tmp_path, **slow) as means:
        jobs = [job(adding.name, f"g0-{n}-a", task()) for n in range(12)]
        results = await asyncio.gather(*(run_rollout(each, means) for each in jobs))
        assert adding.max_episodes == 2
    assert [(result.outcome, result.detail) for result in results] == [(Outcome.OK, "")] * 12
    assert max(result.stages_s.get("wait", 0.0) for result in results) > 2.0, "longer than create may take"
    assert max(result.stages_s["create"] for result in results) < 4.0
    await none_left(full_url)


async def test_an_episode_too_many_is_told_at_once(tmp_path, full_url):
    await none_left(full_url)
    async with environment(tmp_path, full_url, capacity_patience_s=30) as adding:
        async with adding.episode(task(), "a"), adding.episode(task(), "b"):
            with pytest.raises(NoPlace, match="allows 2 sessions"):
                async with adding.episode(task(), "c"):
                    pass
    await none_left(full_url)


async def test_a_server_that_is_full_at_the_start_is_told(tmp_path, full_url):
    others = environment(tmp_path, full_url)
    async with others, others.episode(task(), "a"), others.episode(task(), "b"):
        with pytest.raises(EnvironmentFault, match="gives no session: the server has no place left"):
            async with environment(tmp_path, full_url, capacity_patience_s=0):
                pass


async def test_a_server_of_ours_that_dies_mid_episode_is_started_again(tmp_path):
    async with environment(tmp_path, ADDING) as adding:
        engine = ScriptedEngine([Reply("", [("add", {"number": 1})]), Reply("", [("add", {"number": 99})])])
        async with adding.episode(task(), "r") as one:
            await one.start()
            await called(one, "add", number=1)
            with pytest.raises(EpisodeLost, match="session ended"):
                await called(one, "add", number=99)
            with pytest.raises(EpisodeLost):
                await called(one, "add", number=1)
        assert '"total": 1' in await _one_step(adding)
    result = await play(engine, environment(tmp_path, ADDING), tmp_path, task=task(earn=[1.0]))
    assert (result.outcome, result.reward, result.failed_stage) == ("infra_failed", None, "agent")
    assert result.detail.startswith("EpisodeLost: the session ended")


async def test_a_session_that_broke_is_never_replaced_by_a_fresh_one(tmp_path, adding_url):
    async with environment(tmp_path, adding_url) as adding, adding.episode(task(), "r") as one:
        await one.start()
        await called(one, "add", number=1)
        await one._session._client._ws.close()
        with pytest.raises(EpisodeLost, match="session ended"):
            await called(one, "add", number=1)
    await none_left(adding_url)


async def test_a_step_that_is_given_up_ends_the_session(tmp_path, adding_url):
    async with environment(tmp_path, adding_url, step_timeout_s=0.5) as adding:
        async with adding.episode(task(sleep_s=1.5), "r") as one:
            await one.start()
            with pytest.raises(EpisodeLost, match="did not answer a step in time"):
                await called(one, "add", number=1)
        async with adding.episode(task(sleep_s=0.3), "r") as one:
            await one.start()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(called(one, "add", number=1), 0.05)
            with pytest.raises(EpisodeLost, match="given up before its answer"):
                await called(one, "add", number=1)
    await none_left(adding_url)


async def test_a_long_step_survives_a_link_that_swallows_pings(tmp_path, deaf_url):
    """90 s and pings every 20 s, at a sixtieth of the time."""
    slow = task(sleep_s=1.5)
    async with DeafRelay(deaf_url) as link:
        async with environment(tmp_path, link, **NO_PINGS) as adding, adding.episode(slow, "r") as one:
            await one.start()
            assert '"total": 1' in (await called(one, "add", number=1)).content
        async with environment(tmp_path, link, **QUICK) as adding, adding.episode(slow, "r") as one:
            await one.start()
            with pytest.raises(EpisodeLost, match="keepalive ping timeout"):
                await called(one, "add", number=1)
    await none_left(deaf_url, within_s=30)


async def test_a_long_step_with_pings_that_are_answered(tmp_path, full_url):
    async with environment(tmp_path, full_url, **QUICK) as adding, adding.episode(task(sleep_s=1.5), "r") as one:
        await one.start()
        assert '"total": 1' in (await called(one, "add", number=1)).content
    await none_left(full_url)


async def test_a_server_that_cannot_be_started_again_is_no_fault_of_the_task(tmp_path):
    """It was there when the run began: infra, for the circuit breaker to judge, and no task is quarantined for it."""
    path = tmp_path / "adding.py"
    path.write_text((ENVS / "adding.py").read_text())
    async with environment(tmp_path, f"local:{path}:app") as adding:
        path.unlink()
        async with adding.episode(task(), "r") as one:
            await one.start()
            with pytest.raises(EpisodeLost):
                await called(one, "add", number=99)
        with pytest.raises(EpisodeLost, match="ended at its start"):
            async with adding.episode(task(), "s"):
                pass


async def test_a_large_observation(tmp_path, adding_url):
    big = task(padding=5_000_000)
    async with environment(tmp_path, adding_url) as adding, adding.episode(big, "r") as one:
        await one.start()
        assert len((await called(one, "add", number=1)).content) > 5_000_000
    async with environment(tmp_path, adding_url, max_message_mb=1) as adding, adding.episode(big, "r") as one:
        await one.start()
        with pytest.raises(EpisodeLost, match="too big|exceeds limit"):
            await called(one, "add", number=1)
    await none_left(adding_url)


async def test_a_silent_session_is_ended_where_pings_cannot_tell(tmp_path, deaf_url):
    await none_left(deaf_url, within_s=30)
    holding = await holder(deaf_url)
    try:
        holding.send_signal(signal.SIGSTOP)
        assert await num_sessions(deaf_url) == 1
        await none_left(deaf_url, within_s=30)
    finally:
        holding.kill()
        await holding.wait()


async def test_a_session_that_the_server_has_ended_for_its_silence_is_not_played_on(tmp_path):
    """Its socket stays open then, and OpenEnv would step an environment that it has closed."""
    async with environment(tmp_path, ADDING, idle_timeout_s=0.2) as adding, adding.episode(task(), "r") as one:
        await one.start()
        await asyncio.sleep(0.3)
        with pytest.raises(EpisodeLost, match=r"raise --env\.idle-timeout-s"):
            await called(one, "add", number=1)


RUNNER = """
import asyncio, sys
from pathlib import Path
from tests.loops.openenv_serving import ADDING, environment, task
async def main():
    async with environment(Path(sys.argv[1]), ADDING) as adding, adding.episode(task(), "r") as one:
        await one.start()
        print(adding._server.url, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_server_of_ours_ends_with_a_runner_that_was_killed(tmp_path):
    runner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUNNER,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    async with asyncio.timeout(180):
        url = (await runner.stdout.readline()).decode().strip()
    assert await num_sessions(url) == 1
    runner.kill()
    await runner.wait()
    port = int(url.rpartition(":")[2])
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.1)
