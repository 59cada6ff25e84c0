"""Weights to several replicas of the engine: to all at once, to the others when one dies, to its successor alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from stub_engine import StubEngine, serving

from harness_trainer.errors import ConfigError, TrainingFailed
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.engine_calls import EngineGone
from harness_trainer.learner.engine_presence import EnginePresence
from harness_trainer.learner.replicas import Replicas
from harness_trainer.learner.replicated import ReplicatedAdapters, ReplicatedWeights
from harness_trainer.learner.store_source import StoreGroupSource
from harness_trainer.learner.sync_config import LoraConfig, LoraSync, NcclSync
from harness_trainer.learner.transfers import make_replicated
from harness_trainer.rollouts.store import RolloutStore

WEIGHTS = {"model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}
DEAD = "http://127.0.0.1:1"


@dataclass
class Adapters(StubEngine):
    """vLLM's adapters: what is loaded, by name."""

    adapters: dict[str, str] = field(default_factory=dict)

    def _behave(self, path: str, body: dict) -> tuple[int, object]:
        if path == "v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter.bin").read_text() == "factors"
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path == "v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "v1/models":
            listed = [{"id": name, "root": root, "parent": "m"} for name, root in self.adapters.items()]
            return 200, {"data": [{"id": "m"}, *listed]}
        elif path == "metrics":
            return 200, b'vllm:lora_requests_info{running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'
        return super()._behave(path, body)


class Fleet:
    """Two stub engines, the supervisor's side of them, and the learner's."""

    def __init__(self, folder: Path, engines: list[StubEngine]) -> None:
        self.folder, self.engines = folder, engines
        self.store = RolloutStore(folder / "store.sqlite")
        self.files = [folder / f"engine_url-{n}" for n in range(2)]
        for n, engine in enumerate(engines):
            self.store.forget_engine(n)
            self.files[n].write_text(engine.url)
        self.replicas = self.join()

    def join(self) -> Replicas:
        members = [
            EnginePresence(self.store, file, away_s=5, noticed_s=2, replica=n) for n, file in enumerate(self.files)
        ]
        return Replicas(members, away_s=5)

    def transfer(self, **changes: object) -> ReplicatedWeights | ReplicatedAdapters:
        folder = self.folder / "transfer"
        folder.mkdir(exist_ok=True)
        config = LearnerConfig(**{"verify_sync": "always", **changes})
        found = make_replicated(
            config, self.replicas, directory=folder, keep_weights=None, announce=self.store.announce
        )
        self.replicas.reach()
        found.init_weight_transfer()
        return found

    def dies(self, n: int) -> None:
        """And the supervisor has seen it."""
        self.files[n].unlink()
        self.store.forget_engine(n)

    def comes_back(self, n: int, engine: StubEngine) -> None:
        self.engines[n].version, self.engines[n].loaded = "default", {}
        self.files[n].write_text(engine.url)

    def send(self, transfer: ReplicatedWeights, version: int) -> None:
        """What the trainer does at a sync, and tells of it."""

        def send() -> None:
            transfer.next_version(version)
            transfer.pause()
            transfer.send_weights(iter(WEIGHTS.items()))
            transfer.resume()

        self.replicas.send(send, transfer.init_weight_transfer)
        self.store.publish(version, engine=self.replicas.numbers)

    @property
    def versions(self) -> list[str]:
        return [engine.version for engine in self.engines]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with serving(Adapters()) as first, serving(Adapters()) as second:
        fleet = Fleet(tmp_path, [first, second])
        yield fleet
        fleet.store.close()


def later(work: Callable[[], object], after_s: float = 0.2) -> None:
    threading.Thread(target=lambda: (time.sleep(after_s), work()), daemon=True).start()


def test_a_version_is_published_when_every_replica_has_it(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    assert fleet.store.serving(2) == set()
    fleet.send(transfer, 1)
    assert fleet.versions == ["v1", "v1"] and not any(engine.paused for engine in fleet.engines)
    for engine in fleet.engines:
        assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in WEIGHTS.items())
        assert "collective_rpc" in engine.calls, "each is compared with what was sent"
    assert fleet.store.serving(2) == {0, 1} and fleet.store.versions().engine == 1
    assert list((fleet.folder / "transfer").iterdir()) == []
    assert sorted(transfer.last_timings) == ["load", "pause", "resume", "verify", "write"]


def test_the_others_go_on_without_one_that_died_and_its_successor_alone_is_sent_the_same_again(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.dies(1)
    assert not fleet.replicas.is_lost, "nobody waits for one that is away"
    assert fleet.store.serving(2) == {0} and fleet.store.versions().engine == 1
    fleet.send(transfer, 2)
    assert fleet.versions == ["v2", "v1"] and fleet.store.serving(2) == {0}

    fleet.comes_back(1, fleet.engines[1])
    assert fleet.replicas.is_lost, "now it can be sent what it lacks"
    calls = len(fleet.engines[0].calls)
    fleet.send(transfer, 2)
    assert fleet.versions == ["v2", "v2"] and fleet.store.serving(2) == {0, 1}
    assert len(fleet.engines[0].calls) == calls, "the one that has it is not paused for it again"
    assert not fleet.replicas.is_lost
    fleet.send(transfer, 3)
    assert fleet.versions == ["v3", "v3"]


def test_one_that_dies_under_an_update_is_left_out_of_it(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.engines[1].faults = {"update_weights": [(500, {"error": "CUDA error"})], "health": [(503, {})]}
    later(lambda: fleet.dies(1))
    fleet.send(transfer, 2)
    assert fleet.engines[0].version == "v2" and not fleet.engines[0].paused
    assert fleet.store.serving(2) == {0} and fleet.store.policy_version() == 2
    assert dict(fleet.replicas.numbers) == {0: 1}


def test_what_a_living_replica_refuses_is_an_error_and_the_others_sample_on(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.engines[1].faults = {"update_weights": [(400, {"error": "the weights do not fit"})]}
    with pytest.raises(TrainingFailed, match="do not fit") as caught:
        fleet.send(transfer, 2)
    assert not fleet.replicas.is_gone(caught.value)
    assert not any(engine.paused for engine in fleet.engines)


def test_when_all_have_died_the_first_to_come_back_is_waited_for(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.replicas.require()
    for n in range(2):
        fleet.dies(n)
    with pytest.raises(EngineGone):
        fleet.replicas.require()
    waited = []
    fleet.replicas.while_waiting = lambda: waited.append(1)
    later(lambda: fleet.comes_back(1, fleet.engines[1]))
    fleet.send(transfer, 2)
    assert fleet.versions == ["v1", "v2"] and waited and fleet.store.serving(2) == {1}
    fleet.dies(1)
    fleet.replicas._away_s = 0.2
    with pytest.raises(TrainingFailed, match=r"no replica of the engine came back within 0 s: see logs/engine\*\.log"):
        fleet.send(transfer, 3)


def test_all_that_die_under_an_update_are_sent_it_when_they_are_back(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    for n, engine in enumerate(fleet.engines):
        engine.faults = {"pause": [(500, {"error": "dead"})], "health": [(503, {})] * 3}
        later(lambda n=n: fleet.dies(n))
    later(lambda: [fleet.comes_back(n, engine) for n, engine in enumerate(fleet.engines)], 0.6)
    fleet.send(transfer, 2)
    assert "v2" in fleet.versions and fleet.store.versions().engine == 2
    fleet.send(transfer, 2)
    assert fleet.versions == ["v2", "v2"] and fleet.store.serving(2) == {0, 1}


def test_a_successor_that_dies_again_when_it_is_sent_weights_alone_is_nothing_to_the_others(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.dies(1)
    for fault in "init_weight_transfer_engine", "pause":
        fleet.comes_back(1, fleet.engines[1])
        fleet.engines[1].faults = {fault: [(500, {"error": "dead"})], "health": [(503, {})]}
        later(lambda: fleet.dies(1))
        fleet.send(transfer, 1)
        assert fleet.store.serving(2) == {0} and not fleet.replicas.is_lost
    fleet.comes_back(1, fleet.engines[1])
    assert fleet.replicas.is_lost
    fleet.send(transfer, 1)
    assert fleet.versions == ["v1", "v1"] and fleet.store.serving(2) == {0, 1}


def test_one_that_comes_back_while_the_others_are_sent_weights_is_sent_them_next(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    fleet.dies(1)
    greet, calls = transfer.init_weight_transfer, []

    def greet_and_wait() -> None:
        greet()
        calls.append("greet")
        if len(calls) == 2:  # the last look before it is decided whom to send them
            fleet.comes_back(1, fleet.engines[1])

    transfer.init_weight_transfer = greet_and_wait
    fleet.send(transfer, 2)
    assert fleet.versions == ["v2", "default"], "it has not been told of us, and would refuse"
    assert fleet.store.serving(2) == {0} and fleet.replicas.is_lost
    fleet.send(transfer, 2)
    assert fleet.versions == ["v2", "v2"] and not fleet.replicas.is_lost


def test_a_learner_that_starts_while_one_is_away_goes_on_with_the_others(fleet: Fleet) -> None:
    fleet.dies(0)
    fleet.replicas = fleet.join()
    assert fleet.replicas.reach() == fleet.engines[1].url
    transfer = fleet.transfer()
    fleet.send(transfer, 4)
    assert fleet.versions == ["default", "v4"]
    fleet.comes_back(0, fleet.engines[0])
    fleet.send(transfer, 5)
    assert fleet.versions == ["v5", "v5"]


def test_what_is_published_counts_for_those_engines_that_were_sent_it(fleet: Fleet) -> None:
    transfer = fleet.transfer()
    fleet.send(transfer, 1)
    source = StoreGroupSource(
        fleet.folder / "store.sqlite",
        alive=lambda: None,
        starved_after_s=60,
        engine_number=lambda: fleet.replicas.numbers,
    )
    numbers = dict(fleet.replicas.numbers)
    fleet.dies(1)  # between the update and the word of it
    source.policy_changed(1)
    source.stop()
    assert numbers == {0: 1, 1: 1} and fleet.store.serving(2) == {0}


def test_adapters_are_served_by_every_replica_from_files_of_its_own(fleet: Fleet) -> None:
    transfer = fleet.transfer(lora=LoraConfig(), weight_sync=LoraSync())
    assert isinstance(transfer, ReplicatedAdapters)

    def publish(version: int) -> None:
        transfer.next_version(version)
        folder = transfer.folder_of(version)
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_text("factors")
        transfer.publish(version)
        assert not folder.exists(), "each replica has its own"

    for version in (1, 2):
        publish(version)
    first, second = fleet.engines
    assert list(first.adapters) == list(second.adapters) == ["v1", "v2"]
    assert not set(first.adapters.values()) & set(second.adapters.values())
    fleet.dies(1)
    second.adapters.clear()
    publish(3)
    fleet.comes_back(1, second)
    fleet.replicas.send(lambda: publish(3), transfer.init_weight_transfer)
    assert "v3" in first.adapters and list(second.adapters) == ["v3"]
    assert set(transfer.last_timings) == {"load"}


def test_what_reaches_one_engine_only_is_refused(fleet: Fleet) -> None:
    given = {"directory": fleet.folder, "announce": lambda version: None}
    with pytest.raises(ConfigError, match="nccl reaches one engine only"):
        make_replicated(LearnerConfig(weight_sync=NcclSync()), fleet.replicas, keep_weights=None, **given)
    lora = LearnerConfig(lora=LoraConfig(), weight_sync=LoraSync())
    with pytest.raises(ConfigError, match="leave it out"):
        make_replicated(lora, fleet.replicas, keep_weights=fleet.folder, **given)
