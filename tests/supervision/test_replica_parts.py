"""Several replicas of the engine as parts: started together, held apart, and refused where there is room for one."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from harness_trainer.engine.config import EngineConfig
from harness_trainer.errors import EngineFailed, SetupError
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.supervision.engine import EnginePart
from harness_trainer.supervision.parts import Part, Parts
from harness_trainer.supervision.remote import PARTS
from harness_trainer.supervision.replicas import Replica, release_served, require_one_in_containers
from harness_trainer.supervision.restarts import RestartConfig, Restarts


@dataclass
class Process:
    pid: int = 7
    returncode: int | None = None
    stopped: bool = False

    def alive(self):
        return not self.stopped

    def stop(self, grace_s=0.0, *, successor=False):
        self.stopped = True
        return 0


@dataclass
class Gateway:
    said: list = field(default_factory=list)

    def release(self):
        self.said.append("release")

    def hold(self):
        self.said.append("hold")


@pytest.fixture
def events():
    return []


@pytest.fixture
def parts(events):
    made = Parts(Restarts(RestartConfig()), event=lambda kind, **more: events.append((kind, more)), say=lambda _: None)
    yield made
    made.stop()


def part(folder, name, launch, **more):
    return Part(name, folder / f"{name}.log", EngineFailed, launch, **more)


def test_engines_start_at_the_same_time(parts, events, tmp_path):
    both = threading.Barrier(2, timeout=20)  # one after the other would wait here for ever

    def launch():
        both.wait()
        return Process()

    started = [part(tmp_path, name, launch) for name in ("engine", "engine-1")]
    parts.start_together(started)
    assert all(one.running for one in started)
    assert sorted(more["part"] for kind, more in events if kind == "started") == ["engine", "engine-1"]


def test_when_one_cannot_start_the_others_are_given_up_at_once(parts, tmp_path):
    given_up, slow = threading.Event(), Process()

    def never():
        raise EngineFailed("the engine died while loading weights: no memory")

    def loading():
        assert given_up.wait(20)
        return slow

    with pytest.raises(EngineFailed, match="no memory"):
        parts.start_together(
            [part(tmp_path, "engine", loading, give_up=given_up.set), part(tmp_path, "engine-1", never)]
        )
    began = time.monotonic()
    parts.stop()
    assert time.monotonic() - began < 10 and slow.stopped


def test_a_gateway_lets_calls_through_while_its_own_engine_has_a_policy(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    replicas = []
    for number in range(2):
        store.forget_engine(number)
        engine = EnginePart(
            EngineConfig(), lambda config: None, store, tmp_path / f"url-{number}", status=print, replica=number
        )
        gateway = Gateway()
        engine.hold = gateway.hold
        started = part(tmp_path, "engine", Process)
        started.process = Process()
        replicas.append(Replica(gateway, None, engine, started))

    def said():
        found = [list(replica.gateway.said) for replica in replicas]
        for replica in replicas:
            replica.gateway.said.clear()
        return found

    release_served(replicas, store)
    assert said() == [[], []], "no engine has a policy"
    store.publish(1, engine={0: 1, 1: 1})
    release_served(replicas, store)
    assert said() == [["release"], ["release"]]

    replicas[1].engine.lost()
    release_served(replicas, store)
    assert said() == [["release"], ["hold"]], "the other goes on"
    assert (store.versions().engine, store.engine_number(0), store.engine_number(1)) == (1, 1, 2)
    store.publish(2, engine={0: 1, 1: 1})  # the one that it was sent to has died
    release_served(replicas, store)
    assert said() == [["release"], []]
    store.publish(2, engine={1: 2})
    replicas[0].part.again_at = 5.0
    release_served(replicas, store)
    assert said() == [[], ["release"]], "one that is being started again is not let through either"

    for number in range(2):
        replicas[number].engine.lost()
    assert store.versions().engine == 0, "now nothing samples"
    store.close()


def test_containers_hold_one_engine(monkeypatch, tmp_path):
    require_one_in_containers(3)
    monkeypatch.setenv(PARTS, str(tmp_path))
    require_one_in_containers(1)
    with pytest.raises(
        SetupError, match=r"engine\.replicas is 3, and compose\.yaml has one container .* leave it at 1"
    ):
        require_one_in_containers(3)
