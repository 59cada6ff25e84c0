"""Weight transfer against a stub engine that fails in every way: an error in time, the engine running, no file left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stub_engine import StubEngine, serving

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.sync_config import VerifySync
from harness_trainer.learner.weight_transfer import ShmWeightTransfer, remove_unsent

WEIGHTS = {"model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with serving(StubEngine()) as stub:
        yield stub


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def transfer(engine: StubEngine, shm: Path) -> Iterator[ShmWeightTransfer]:
    limits = {"control_timeout_s": 1.5, "load_timeout_s": 1.5, "cleanup_timeout_s": 1.5}  # of a stub on loopback
    transfer = ShmWeightTransfer(engine.url, directory=shm, **limits)
    yield transfer
    transfer.destroy()


def sync(transfer: ShmWeightTransfer, version: int) -> None:
    """What TRL does at each sync."""
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(iter(WEIGHTS.items()))
    transfer.resume()


def test_a_sync_loads_the_weights_under_the_version_and_leaves_nothing(
    engine: StubEngine, transfer: ShmWeightTransfer, shm: Path
) -> None:
    transfer.init_weight_transfer()
    sync(transfer, 3)
    assert engine.version == "v3"
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in WEIGHTS.items())
    assert not engine.paused
    assert list(shm.iterdir()) == []
    assert sorted(transfer.last_timings) == ["load", "pause", "resume", "verify", "write"]


def test_the_engine_samples_on_while_the_weights_are_written(engine: StubEngine, transfer: ShmWeightTransfer) -> None:
    transfer.next_version(1)
    transfer.pause()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        assert not engine.paused
        yield from WEIGHTS.items()

    transfer.send_weights(weights())
    assert engine.calls[:2] == ["pause", "start_weight_update"]


def test_what_a_dead_trainer_left_half_loaded_is_not_sampled_with_before_it_has_a_name(
    engine: StubEngine, transfer: ShmWeightTransfer, shm: Path
) -> None:
    """It was killed between two of its calls: the engine is frozen, with new weights under the old name."""
    sync(transfer, 1)
    transfer.next_version(2)
    engine.paused = engine.active = True
    engine.loaded = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    (shm / "weights-0123.safetensors").write_bytes(b"of the dead one")

    remove_unsent(shm)
    successor = ShmWeightTransfer(engine.url, directory=shm)
    successor.init_weight_transfer()
    assert engine.paused, "frozen requests would go on with v2's weights under the name v1"
    sync(successor, 3)
    successor.destroy()
    assert (engine.version, engine.paused, engine.active) == ("v3", False, False)
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in WEIGHTS.items())
    assert list(shm.iterdir()) == []


def test_kept_weights_are_named_after_their_version(engine: StubEngine, shm: Path, tmp_path: Path) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=shm, keep_dir=tmp_path / "kept")
    transfer.init_weight_transfer()
    sync(transfer, 1)
    sync(transfer, 2)
    transfer.destroy()
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["v1.safetensors", "v2.safetensors"]
    assert torch.equal(load_file(tmp_path / "kept" / "v2.safetensors")["model.norm.weight"], torch.ones(3))
    assert list(shm.iterdir()) == []


def test_tensors_that_share_memory_are_sent_both(engine: StubEngine, transfer: ShmWeightTransfer) -> None:
    head = WEIGHTS["model.embed_tokens.weight"]
    transfer.next_version(1)
    transfer.send_weights([*WEIGHTS.items(), ("lm_head.weight", head), ("part.weight", head[:2])])
    assert torch.equal(engine.loaded["lm_head.weight"], head)
    assert torch.equal(engine.loaded["part.weight"], head[:2])


def out_of_memory() -> tuple[int, Any]:
    return 500, {"error": {"message": "CUDA out of memory"}}


@pytest.mark.parametrize(
    ("path", "fault", "text"),
    [
        ("pause", out_of_memory, "/pause with 500: CUDA out of memory"),
        ("pause", lambda: "hang", r"did not answer /pause within 1\.5 s"),
        ("start_weight_update", out_of_memory, "CUDA out of memory"),
        ("update_weights", out_of_memory, "CUDA out of memory"),
        ("update_weights", lambda: (502, b"<html>bad gateway</html>"), "502: <html>bad gateway"),
        ("update_weights", lambda: (422, {"detail": [{"msg": "field required"}]}), "field required"),
        ("update_weights", lambda: "hang", r"did not answer /update_weights within 1\.5 s"),
        ("update_weights", lambda: (200, "trickle"), r"did not answer /update_weights within 2 s"),
        ("finish_weight_update", out_of_memory, "CUDA out of memory"),
        ("finish_weight_update", lambda: "hang", "did not answer /finish_weight_update"),
        ("weight_info", lambda: (200, {"weight_version": "v1"}), "says its weights are 'v1' after 'v7'"),
        ("weight_info", lambda: (200, b"not json"), "not JSON"),
    ],
)
def test_a_failing_call_ends_in_time_with_the_engines_text_and_a_running_engine(
    engine: StubEngine, transfer: ShmWeightTransfer, shm: Path, path: str, fault: Callable[[], Any], text: str
) -> None:
    engine.faults[path] = [fault()]
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match=text) as caught:
        sync(transfer, 7)
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    assert engine.calls[-1] == "resume"
    assert not engine.paused
    assert not engine.active
    assert list(shm.iterdir()) == []
    # A restarted trainer, or the same one, goes on.
    sync(transfer, 8)
    assert engine.version == "v8"


def test_weights_that_may_be_of_two_policies_get_a_version_of_their_own(
    engine: StubEngine, transfer: ShmWeightTransfer
) -> None:
    sync(transfer, 1)
    engine.faults["update_weights"] = [out_of_memory()]
    with pytest.raises(TrainingFailed):
        sync(transfer, 2)
    assert engine.version == "v2-partial"


def test_a_refused_file_leaves_the_version(engine: StubEngine, transfer: ShmWeightTransfer) -> None:
    sync(transfer, 1)
    engine.faults["update_weights"] = [(500, {"error": {"message": "wrong shape; the weights are unchanged"}})]
    with pytest.raises(TrainingFailed, match="wrong shape"):
        sync(transfer, 2)
    assert engine.version == "v1"


def test_an_update_that_is_already_active_is_closed_and_replaced(
    engine: StubEngine, transfer: ShmWeightTransfer
) -> None:
    engine.active = True
    sync(transfer, 4)
    assert engine.version == "v4"
    assert not engine.active


def test_an_update_that_stays_active_is_an_error_with_the_engines_text(
    engine: StubEngine, transfer: ShmWeightTransfer
) -> None:
    engine.faults["start_weight_update"] = [(409, {"error": "a weight update is already active"})] * 2
    with pytest.raises(TrainingFailed, match="409: a weight update is already active"):
        sync(transfer, 4)
    assert not engine.paused


def test_a_resume_that_fails_once_is_tried_again_but_reported(engine: StubEngine, transfer: ShmWeightTransfer) -> None:
    engine.faults["resume"] = [out_of_memory()]
    with pytest.raises(TrainingFailed, match=r"resuming the engine failed: .*CUDA out of memory"):
        sync(transfer, 1)
    assert not engine.paused


def test_a_resume_that_never_works_says_that_the_engine_may_be_paused(
    engine: StubEngine, transfer: ShmWeightTransfer
) -> None:
    engine.faults["resume"] = [out_of_memory()] * 9
    with pytest.raises(TrainingFailed, match="may still be paused"):
        sync(transfer, 1)


def test_weights_that_cannot_be_produced_leave_the_engine_running(
    engine: StubEngine, transfer: ShmWeightTransfer, shm: Path
) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise RuntimeError("all-gather failed")

    transfer.next_version(1)
    transfer.pause()
    with pytest.raises(TrainingFailed, match="all-gather failed"):
        transfer.send_weights(weights())
    assert not engine.paused
    assert list(shm.iterdir()) == []


def test_ctrl_c_resumes_the_engine_and_stays_ctrl_c(engine: StubEngine, transfer: ShmWeightTransfer, shm: Path) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise KeyboardInterrupt

    engine.paused = True
    transfer.next_version(1)
    with pytest.raises(KeyboardInterrupt):
        transfer.send_weights(weights())
    assert not engine.paused


def test_an_engine_that_is_gone_is_named(shm: Path) -> None:
    transfer = ShmWeightTransfer("http://127.0.0.1:1", directory=shm, cleanup_timeout_s=0.3)
    with pytest.raises(TrainingFailed, match="cannot be reached"):
        transfer.init_weight_transfer()
    with pytest.raises(TrainingFailed, match=r"cannot be reached for /pause.*restart it"):
        sync(transfer, 1)
    transfer.destroy()


def test_a_missing_memory_folder_falls_back_with_a_warning(
    engine: StubEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=tmp_path / "none", fallback_dir=tmp_path)
    sync(transfer, 1)
    transfer.destroy()
    assert "no room for the weights" in caplog.text
    assert engine.version == "v1"
    assert list(tmp_path.iterdir()) == []


def test_no_room_anywhere_is_an_error_before_the_engine_is_paused(engine: StubEngine, tmp_path: Path) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=tmp_path / "none", fallback_dir=tmp_path / "neither")
    with pytest.raises(TrainingFailed, match=r"none and .*neither have no room for 0 MiB of weights; free space"):
        sync(transfer, 1)
    transfer.destroy()
    assert "pause" not in engine.calls


def test_weights_without_a_version_are_refused(engine: StubEngine, transfer: ShmWeightTransfer) -> None:
    sync(transfer, 1)
    with pytest.raises(TrainingFailed, match="next_version"):
        transfer.send_weights(WEIGHTS.items())
    assert engine.version == "v1"


def test_weights_that_are_never_written_are_an_error_in_time(engine: StubEngine, shm: Path) -> None:
    """A disk that hangs, or a gather whose peers are gone."""
    transfer = ShmWeightTransfer(engine.url, directory=shm, write_timeout_s=0.3)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        engine.released.wait()
        yield "a", torch.ones(1)

    transfer.next_version(1)
    with pytest.raises(TrainingFailed, match=r"the weights were not written within 0\.3 s"):
        transfer.send_weights(weights())
    transfer.destroy()
    assert not engine.paused and "pause" not in engine.calls


def test_each_version_is_announced_before_the_engine_can_know_it(engine: StubEngine, shm: Path) -> None:
    announced: list[tuple[int, str]] = []
    transfer = ShmWeightTransfer(
        engine.url, directory=shm, announce=lambda version: announced.append((version, engine.version))
    )
    sync(transfer, 1)
    sync(transfer, 2)
    transfer.destroy()
    assert announced == [(1, "default"), (2, "v1")]


@pytest.mark.parametrize(("verify", "compared"), [("never", 0), ("start", 1), ("always", 3)])
def test_weights_are_compared_when_the_config_says_so(
    engine: StubEngine, shm: Path, verify: VerifySync, compared: int
) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=shm, verify=verify)
    for version in (1, 2, 3):
        sync(transfer, version)
    assert engine.calls.count("collective_rpc") == compared
    transfer.compare_next()
    sync(transfer, 4)
    assert engine.calls.count("collective_rpc") == compared + 1
    assert transfer.check.run() == {"loaded": len(WEIGHTS)}  # on demand, now
    transfer.destroy()


def test_an_engine_with_other_weights_is_named_by_tensor_and_never_trained_from(engine: StubEngine, shm: Path) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=shm, verify="start", cleanup_timeout_s=1.5)
    engine.faults["collective_rpc"] = ["garble"]
    with pytest.raises(TrainingFailed, match=r"'model\.embed_tokens\.weight' \(loaded\) differs from what was sent"):
        sync(transfer, 1)
    assert engine.version == "v1-partial" and not engine.paused
    sync(transfer, 2)  # still due, and equal now
    assert engine.calls.count("collective_rpc") == 2
    transfer.destroy()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((500, {"error": "no attribute harness_digests"}), "no attribute harness_digests.*--worker-extension-cls"),
        ((200, {"results": [{}]}), "neither loaded nor received 'model.embed_tokens.weight'"),
        ((200, {}), "neither loaded nor received"),
    ],
)
def test_an_engine_that_cannot_compare_is_an_error_that_says_what_to_do(
    engine: StubEngine, shm: Path, answer: tuple[int, Any], text: str
) -> None:
    transfer = ShmWeightTransfer(engine.url, directory=shm, verify="start", cleanup_timeout_s=1.5)
    engine.faults["collective_rpc"] = [answer]
    with pytest.raises(TrainingFailed, match=text) as caught:
        sync(transfer, 1)
    assert "verify_sync" in str(caught.value)
    transfer.destroy()


def test_every_worker_is_compared(engine: StubEngine, shm: Path) -> None:
    engine.num_workers = 2
    transfer = ShmWeightTransfer(engine.url, directory=shm)
    sync(transfer, 1)
    assert transfer.check.run() == {"loaded": 2 * len(WEIGHTS)}
    transfer.destroy()
