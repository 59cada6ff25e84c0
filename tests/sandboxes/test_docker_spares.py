"""Relays that run before a sandbox needs one: handed out once, replaced when dead, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import docker
import pytest

from sandboxes.base import Access, BoxSpec, Endpoint, Network, NetworkMode, SandboxError, SandboxGone
from sandboxes.docker import DockerBackend
from sandboxes.docker_network import GATEWAY_PORT
from sandboxes.docker_sidecar import NetworkLink
from sandboxes.docker_spares import Spare, Spares, sandbox_claim
from sandboxes.lifecycle import reap
from tests.sandboxes.netboxes import METADATA, Box, Engine, baits, gateways, open_engine
from tests.sandboxes.test_docker_network_life import ASK, gateway, killed_run

SEALED = Network(NetworkMode.PROXY_ONLY)
PUBLIC = Network(NetworkMode.PUBLIC)


@pytest.fixture
def engine(docker_engine: str, docker_base_image: str, tmp_path: Path) -> Iterator[Engine]:
    """Fails the test that leaves something of its run behind."""
    engine = open_engine(docker_engine, docker_base_image, tmp_path)
    yield engine
    left = engine.left()
    engine.api.close()
    assert left == []


@contextlib.asynccontextmanager
async def stocked(engine: Engine, network: Network = SEALED, *, spares: int = 4) -> AsyncIterator[DockerBackend]:
    """A run that has prepared, and so has one spare."""
    async with gateway(b"x") as url, engine.run(Access(gateway=Endpoint(url=url)), spares=spares) as run:
        await run.prepare(BoxSpec("spares", image=engine.image, network=network))
        await run.network.spares.settled()
        yield run


async def relays(engine: Engine) -> set[str]:
    return {name for name in await asyncio.to_thread(engine.left) if name.endswith("-net")}


async def test_many_at_once_take_each_spare_once_and_the_rest_make_their_own(engine: Engine) -> None:
    async with stocked(engine, spares=3) as run:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):  # each start orders a spare
                await asyncio.gather(*(stack.enter_async_context(engine.box(run, SEALED)) for _ in range(2)))
            await run.network.spares.settled()
        before = await relays(engine)
        assert len(before) == 3, "no more than the bound"
        async with contextlib.AsyncExitStack() as stack:
            boxes = await asyncio.gather(*(stack.enter_async_context(engine.box(run, SEALED)) for _ in range(6)))
            names = [box.relay for box in boxes]
            assert len(set(names)) == 6 and before < set(names)
            for box in boxes:
                assert await box.run(*ASK) == (0, "x")
            await run.network.spares.settled()
            assert len(await relays(engine)) == 6 + 3
        assert not await relays(engine) & set(names), "a relay ends with its sandbox, and serves no second one"


@pytest.mark.parametrize("network", [SEALED, PUBLIC], ids=["sealed", "public"])
async def test_a_sandbox_on_a_spare_reaches_no_more_than_another(engine: Engine, network: Network) -> None:
    async with stocked(engine, network) as run, baits() as found:
        (spare,) = await relays(engine)
        async with engine.box(run, network) as box:
            assert box.relay == spare
            door = ["tcp", "127.0.0.1", GATEWAY_PORT]
            hosts = [*gateways(engine.api), METADATA, "10.0.0.1", "192.168.0.1"]
            targets = [*found.targets(), *(["tcp", host, port] for host in hosts for port in (80, found.everywhere))]
            assert await box.answered([*targets, door]) == [door]
            assert found.touched == []
            await run.network.spares.settled()
            assert len(await relays(engine)) == 2, "it was replaced"


async def test_a_sandbox_without_a_network_takes_and_orders_no_spare(engine: Engine) -> None:
    async with stocked(engine) as run:
        before = await relays(engine)
        async with engine.box(run, Network(NetworkMode.NONE)):
            await run.network.spares.settled()
            assert await relays(engine) == before and len(before) == 1


async def test_a_spare_of_another_kind_is_not_taken(engine: Engine) -> None:
    async with stocked(engine) as run:
        (spare,) = await relays(engine)
        async with engine.box(run, PUBLIC) as box:
            assert box.relay != spare
            async with engine.box(run, SEALED) as other:
                assert other.relay == spare


@pytest.mark.parametrize("how", ["killed", "removed"])
async def test_a_dead_spare_is_replaced_by_a_relay_of_the_sandboxs_own(engine: Engine, how: str) -> None:
    async with stocked(engine) as run:
        (spare,) = await relays(engine)
        if how == "killed":
            await asyncio.to_thread(engine.api.kill, spare)
        else:
            await asyncio.to_thread(engine.api.remove_container, spare, force=True)
        await asyncio.sleep(0.2)
        async with engine.box(run, SEALED) as box:
            assert box.relay != spare
            assert await box.run(*ASK) == (0, "x")
            await run.network.spares.settled()
            now = await relays(engine)
            assert spare not in now and len(now) == 2
            assert not (engine.registry / f"{spare.removesuffix('-net')}.json").exists()


async def test_what_cannot_be_made_ahead_fails_no_one_but_who_needs_it(engine: Engine) -> None:
    async with stocked(engine) as run:
        (spare,) = await relays(engine)
        run.network._image = "no-such-image:0"
        async with engine.box(run, SEALED) as box:
            assert box.relay == spare
            await run.network.spares.settled()
            assert await relays(engine) == {spare}
            with pytest.raises(SandboxError, match="no-such-image"):
                async with engine.box(run, SEALED):
                    pass


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("network", [SEALED, PUBLIC], ids=["sealed", "public"])
async def test_a_run_that_ends_while_a_spare_is_made_leaves_nothing(
    engine: Engine, network: Network, pause_s: float
) -> None:
    async with gateway(b"x") as url, engine.run(Access(gateway=Endpoint(url=url)), spares=4) as run:
        await run.prepare(BoxSpec("spares", image=engine.image, network=network))
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.05, 0.3])
async def test_a_sandbox_that_is_cancelled_while_it_takes_a_spare_ends_it(engine: Engine, pause_s: float) -> None:
    async with stocked(engine) as run:
        (spare,) = await relays(engine)
        box = run.sandbox(BoxSpec("spares", image=engine.image))
        starting = asyncio.create_task(box.__aenter__())
        async with asyncio.timeout(10):
            while box._claim is None:
                await asyncio.sleep(0)
        await asyncio.sleep(pause_s)
        starting.cancel()
        await asyncio.wait([starting])
        await box.stop()
        assert spare not in await relays(engine)


async def test_an_old_spare_is_reaped_as_carefully_as_a_new_sandbox(engine: Engine) -> None:
    """The engine may still be making the container when its owner is killed, however old the relay's record is."""
    async with stocked(engine) as run:
        spare = run.network.take_spare(SEALED)
        assert spare is not None
        spare.claim.created_at -= 3600
        began = time.time()
        run.network.spares._ready.append((run.network._kind(run.network._plan(SEALED)), spare))
        async with run.sandbox(BoxSpec("spares", image=engine.image)) as box:
            assert box.sandbox_id == spare.claim.id
            assert spare.claim.created_at >= began


async def test_what_a_killed_owner_left_is_reaped_with_its_spares_and_a_living_runs_are_not(engine: Engine) -> None:
    async with stocked(engine) as living:
        kept = set(await asyncio.to_thread(engine.left))
        (spare,) = await relays(engine)
        async with gateway(b"x") as url:
            ids, folders = await killed_run(engine, url, NetworkMode.PROXY_ONLY, NetworkMode.PUBLIC, spares=4)
        left = await relays(engine)
        assert {f"{each}-net" for each in ids} < left and len(left) > 1 + len(ids), "spares, too"
        with pytest.raises(SandboxGone):
            await living.attach(spare.removesuffix("-net"))
        assert {item.problem for item in await asyncio.to_thread(reap, engine.registry)} == {""}
        assert set(await asyncio.to_thread(engine.left)) == kept and not folders[0].exists()
        async with engine.box(living, SEALED) as box:
            assert box.relay == spare and await box.run(*ASK) == (0, "x")


async def test_a_sandbox_on_a_spare_is_taken_over_with_its_relay_and_the_other_spares_are_reaped(
    engine: Engine,
) -> None:
    async with gateway(b"old") as old, gateway(b"new") as new:
        modes = (NetworkMode.PROXY_ONLY, NetworkMode.PUBLIC)
        ids, _ = await killed_run(engine, old, *modes, spares=4)
        async with engine.run(Access(gateway=Endpoint(url=new)), spares=4) as run:
            boxes = [Box(await run.attach(each)) for each in ids]
            await asyncio.to_thread(reap, engine.registry)
            assert await relays(engine) == {box.relay for box in boxes}
            for box in boxes:
                assert await box.run(*ASK) == (0, "new")


# --- how many, and when ------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[list[str], Callable[[str], Callable[[], Awaitable[Spare]]]]]:
    """Makers of spares that hold no relay, and the kinds that were begun."""
    kinds: list[str] = []
    api = docker.APIClient("unix:///nowhere", version="1.41")  # connects only when asked something
    alone = NetworkLink(api, asyncio.to_thread, None, {})

    def maker(kind: str) -> Callable[[], Awaitable[Spare]]:
        async def begin() -> Spare:
            kinds.append(kind)
            claim = await asyncio.to_thread(
                lambda: sandbox_claim(tmp_path / "owned", run_id="r", address="unix:///nowhere")
            )
            return Spare(claim, alone)

        return begin

    yield kinds, maker
    assert list((tmp_path / "owned").glob("*")) == [], "no record is left"


async def test_none_is_begun_while_a_sandbox_is_created(begun) -> None:
    kinds, maker = begun
    spares = Spares(4)
    with spares.held_back():
        spares.order("a", maker("a"))
        with spares.held_back():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)
        assert kinds == []
    await spares.settled()
    assert kinds == ["a"]
    assert await spares.close() == []


async def test_the_bound_holds_and_a_kind_that_is_asked_for_takes_the_place_of_one_that_is_not(begun) -> None:
    kinds, maker = begun
    spares = Spares(2)
    for _ in range(5):
        spares.order("a", maker("a"))
    spares.order("a", maker("a"), first=True)
    await spares.settled()
    assert kinds == ["a", "a"]
    spares.order("b", maker("b"), first=True)
    spares.order("b", maker("b"), first=True)
    await spares.settled()
    assert kinds == ["a", "a", "b"]
    await spares.close()
    spares.order("a", maker("a"))
    await spares.settled()
    assert kinds == ["a", "a", "b"], "closed"


@pytest.mark.parametrize("bound", [0, 1])
async def test_closing_at_once_leaves_no_record(begun, bound: int) -> None:
    kinds, maker = begun
    spares = Spares(bound)
    spares.order("a", maker("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await spares.close() == []
    assert len(kinds) == bound
