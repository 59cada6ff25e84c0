"""NCCL through TRL's client: what it is given, and that each way it fails or hangs ends with the engine running.

The group is a stand-in: NCCL needs two GPUs. The client's calls to the engine are made as TRL's class makes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Bare
from typing import Any

import httpx
import pytest
import torch
from stub_engine import StubEngine, serving
from test_train import Run

from harness_trainer.engine.digests import digest
from harness_trainer.engine.worker_extension import DigestExtension
from harness_trainer.errors import SetupError, TrainingFailed
from harness_trainer.learner.nccl_transfer import Manifest, NcclWeightTransfer

WEIGHTS = {"model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}
MANIFEST: Manifest = {
    "names": list(WEIGHTS),
    "dtype_names": ["float32"] * 2,
    "shapes": [list(tensor.shape) for tensor in WEIGHTS.values()],
}

COMPARED = {
    "model.norm.weight": {"of": "loaded", "dtype": "float32", "digest": digest(torch.ones(3), torch.float32)},
}


class Client:
    """TRL's `WeightTransferClient` with a queue in NCCL's place: the engine's half takes what this half broadcasts."""

    def __init__(self, engine: StubEngine, manifest: Manifest) -> None:
        self.engine, self.manifest = engine, manifest
        self.hang_in = ""  # a phase whose other half never joins
        self.error: Exception | None = None  # of the trainer's half
        self.joined = self.destroyed = False

    def init_weight_transfer(self) -> None:
        self._post("init_weight_transfer_engine", {"init_info": {"world_size": 2}})
        self._maybe_hang("init")
        self.joined = True

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert self.joined
        self._post("start_weight_update", {"is_checkpoint_format": True})
        sent = {name: tensor.clone() for name, tensor in iterator}
        assert list(sent) == self.manifest["names"]
        try:
            self._post("update_weights", {"update_info": self.manifest})
            self._maybe_hang("send")
            if self.error is not None:
                raise self.error
        except Exception as error:
            raise RuntimeError("Weight sync to the vLLM server failed. Restart it.") from error
        self.engine.loaded = sent
        self._post("finish_weight_update", None)

    def destroy(self) -> None:
        self.destroyed = True

    def _post(self, path: str, body: Any) -> None:
        response = httpx.post(f"{self.engine.url}/{path}", json=body, timeout=30)
        if response.status_code != 200:
            raise Exception(f"Request failed: {response.status_code}, {response.text}")

    def _maybe_hang(self, phase: str) -> None:
        if self.hang_in == phase:
            self.engine.released.wait()


class NcclStub(StubEngine):
    """The weights come over NCCL, so `update_weights` brings none."""

    def _behave(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "update_weights":
            assert self.active and self.paused
            return 200, {}
        return super()._behave(path, body)


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with serving(NcclStub()) as stub:
        yield stub


@pytest.fixture
def made() -> list[Client]:
    return []


@pytest.fixture
def transfer(engine: StubEngine, made: list[Client]) -> Iterator[NcclWeightTransfer]:
    def make(base_url: str, manifest: Manifest, timeout_s: float) -> Client:
        assert (base_url, timeout_s) == (engine.url, 1.5)
        made.append(Client(engine, manifest))
        return made[-1]

    transfer = NcclWeightTransfer(
        engine.url, make, verify="always", transfer_timeout_s=1.5, control_timeout_s=1.5, cleanup_timeout_s=1.5
    )
    transfer.describe(MANIFEST)
    yield transfer
    transfer.destroy()
    assert made[-1].destroyed


def sync(transfer: NcclWeightTransfer, version: int) -> None:
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(iter(WEIGHTS.items()))
    transfer.resume()


def test_a_sync_publishes_the_weights_under_their_name(
    engine: StubEngine, transfer: NcclWeightTransfer, made: list[Client]
) -> None:
    transfer.init_weight_transfer()
    sync(transfer, 3)
    assert made[0].manifest == MANIFEST
    assert engine.version == "v3" and not engine.paused and not engine.active
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in WEIGHTS.items())
    named, resumed = engine.calls.index("update_weight_version"), len(engine.calls) - 1
    assert engine.calls.index("finish_weight_update", 1) < named < engine.calls.index("collective_rpc") < resumed
    assert transfer.check.run() == {"loaded": len(WEIGHTS)}


def test_an_engine_that_a_dead_trainer_left_is_taken_over(engine: StubEngine, transfer: NcclWeightTransfer) -> None:
    engine.paused = engine.active = True
    transfer.init_weight_transfer()
    assert not engine.paused and not engine.active
    assert engine.version == "unfinished-partial", "it may hold anything: what it samples meanwhile is not trained on"
    sync(transfer, 4)
    assert engine.version == "v4"


def test_an_engine_that_runs_keeps_the_name_of_its_weights(engine: StubEngine, transfer: NcclWeightTransfer) -> None:
    engine.version = "v3"
    transfer.init_weight_transfer()
    assert engine.version == "v3"


@pytest.mark.parametrize(
    ("path", "fault", "text"),
    [
        ("start_weight_update", (409, {"error": "a weight update is already active"}), "already active"),
        ("update_weights", (500, {"error": {"message": "CUDA out of memory"}}), "Restart it.*CUDA out of memory"),
        ("finish_weight_update", (500, {"error": "no room"}), "no room"),
        ("update_weight_version", (500, {"error": "no name"}), "no name"),
        ("weight_info", (200, {"weight_version": "v1"}), "says its weights are 'v1' after 'v7'"),
    ],
)
def test_a_failing_call_ends_with_the_engines_text_and_a_running_engine(
    engine: StubEngine, transfer: NcclWeightTransfer, path: str, fault: Any, text: str
) -> None:
    transfer.init_weight_transfer()
    engine.faults[path] = [fault]
    with pytest.raises(TrainingFailed, match=text) as caught:
        sync(transfer, 7)
    assert "\n" not in str(caught.value)
    assert not engine.paused and not engine.active and engine.version == "v7-partial"
    sync(transfer, 8)
    assert engine.version == "v8"


@pytest.mark.parametrize(("phase", "text"), [("init", "did not join the NCCL group"), ("send", "were not sent")])
def test_a_half_that_never_joins_is_an_error_in_time(
    engine: StubEngine, transfer: NcclWeightTransfer, made: list[Client], phase: str, text: str
) -> None:
    """The engine answered 200, and the collective waits for ever."""
    made[0].hang_in = phase
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match=rf"{text} within 1\.5 s"):
        transfer.init_weight_transfer()
        sync(transfer, 7)
    assert time.monotonic() - began < 8
    assert not engine.paused and not engine.active


def test_an_error_of_our_own_half_is_told(engine: StubEngine, transfer: NcclWeightTransfer, made: list[Client]) -> None:
    transfer.init_weight_transfer()
    made[0].error = RuntimeError("NCCL error: unhandled system error")
    with pytest.raises(TrainingFailed, match="unhandled system error"):
        sync(transfer, 2)
    assert not engine.paused


def test_a_pause_that_fails_leaves_the_engine_running(engine: StubEngine, transfer: NcclWeightTransfer) -> None:
    engine.faults["pause"] = ["hang"]
    with pytest.raises(TrainingFailed, match="did not answer /pause"):
        sync(transfer, 2)
    assert engine.calls[-1] == "resume"


def test_ctrl_c_resumes_the_engine_and_stays_ctrl_c(engine: StubEngine, transfer: NcclWeightTransfer) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        raise KeyboardInterrupt
        yield

    transfer.init_weight_transfer()
    transfer.next_version(1)
    transfer.pause()
    with pytest.raises(KeyboardInterrupt):
        transfer.send_weights(weights())
    assert not engine.paused


def test_what_was_not_described_cannot_be_sent(engine: StubEngine) -> None:
    transfer = NcclWeightTransfer(engine.url, lambda *_: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TrainingFailed, match="describe"):
        transfer.init_weight_transfer()
    transfer.destroy()


def test_the_trainer_describes_exactly_what_it_sends(engine: StubEngine, tiny_model: Path, tmp_path: Path) -> None:
    """The engine sizes its buffers by the description: one name more or less would hang both halves."""
    made: list[Client] = []

    def make(base_url: str, manifest: Manifest, timeout_s: float) -> Client:
        made.append(Client(engine, manifest))
        return made[-1]

    run = Run(tiny_model, tmp_path)
    run.transfer = NcclWeightTransfer(engine.url, make, verify="always")
    run.source.policy_changed = run.source.versions.append
    run.go(max_steps=1)
    assert run.source.versions == [1, 2] and made[0].destroyed
    shapes = dict(zip(made[0].manifest["names"], made[0].manifest["shapes"], strict=True))
    assert {name: list(tensor.shape) for name, tensor in engine.loaded.items()} == shapes
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"]
    assert set(made[0].manifest["dtype_names"]) == {"float32"}


def test_trls_client_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Construction only, with vLLM's half declared present: TRL's class keeps manifest, address and limit."""
    # In this order: the module declares TRL's warning of experimental names settled.
    from harness_trainer.learner.trl_compat import nccl_client, trl_transfer

    with pytest.raises(SetupError, match="weight_sync shm"):
        nccl_client("http://127.0.0.1:1", MANIFEST, 60)
    monkeypatch.setattr(trl_transfer, "is_vllm_available", lambda *_: True)
    monkeypatch.setattr(trl_transfer, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    client = nccl_client("http://127.0.0.1:1/", MANIFEST, 59.5)
    assert client.vllm.server_url == "http://127.0.0.1:1" and client.weight_sync_timeout == 60
    assert client._weight_update_info == MANIFEST
    client.destroy()


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([{name: {"of": "unseen"} for name in WEIGHTS}] * 2, "none of 4 weights could be compared"),
        ([{**{name: {"of": "unseen"} for name in WEIGHTS}, **COMPARED}], "1 of 2 weights could be compared"),
    ],
    ids=["split over two workers", "fused experts"],
)
def test_what_the_engine_cannot_show_is_told_and_no_reason_to_end(
    engine: StubEngine, transfer: NcclWeightTransfer, workers: list[Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    transfer.init_weight_transfer()
    engine.faults["collective_rpc"] = [(200, {"results": workers})]
    sync(transfer, 1)
    assert engine.version == "v1" and not engine.paused
    assert said in caplog.text and "log-probabilities are compared" in caplog.text


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("engine_of_transfer", "of"), [(Bare(), "unseen"), (Bare(received={}), None)])
def test_a_worker_says_of_what_it_cannot_read_that_it_is_unseen(
    num_workers: int, engine_of_transfer: Bare, of: str | None
) -> None:
    """vLLM's NCCL engine keeps nothing of what it receives; ours does, and then a name that it lacks is a fault."""
    worker: Any = DigestExtension()
    model = torch.nn.Module()
    model.norm = torch.nn.LayerNorm(3, bias=False)
    worker.weight_transfer_engine, worker.model_config = engine_of_transfer, Bare(dtype=torch.float32)
    worker.model_runner, worker.parallel_config = Bare(get_model=lambda: model), Bare(world_size=num_workers)
    found = worker.harness_digests('{"norm.weight": [3], "experts.0.up_proj.weight": [4, 3]}')
    kinds = {name: entry["of"] for name, entry in found.items()}
    unread = {name: of for name in ("norm.weight", "experts.0.up_proj.weight") if of}
    assert kinds == {**unread, **({"norm.weight": "loaded"} if num_workers == 1 else {})}
