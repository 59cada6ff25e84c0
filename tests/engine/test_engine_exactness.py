"""Log-probabilities of a real engine equal a plain float32 forward pass, before, after and across weight updates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.weight_transfer import ShmWeightTransfer

TOLERANCE = 1e-3
NUM_LONG, NUM_BEFORE = 1000, 30  # tokens of the long request, and of it before the update


@pytest.fixture
def transfer(tiny_engine: Any, tmp_path: Path) -> Iterator[ShmWeightTransfer]:
    transfer = ShmWeightTransfer(tiny_engine.base_url, directory=tmp_path, keep_dir=tmp_path / "kept")
    transfer.init_weight_transfer()
    yield transfer
    transfer.destroy()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The engine needs the cores; threads of ours that wait for each other would only take them away."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy(tiny_engine: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_engine.model_path, dtype=torch.float32).eval()


def prompt(seed: int, length: int = 300) -> list[int]:
    """Longer than two blocks of the prefix cache, so that a stale cache would show."""
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


def body(prompt_ids: list[int], num_tokens: int, **sampling: Any) -> dict[str, Any]:
    params = {"max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0, **sampling}
    return {"token_ids": prompt_ids, "sampling_params": params}


def sample(base_url: str, prompt_ids: list[int], num_tokens: int = 64, **sampling: Any) -> dict[str, Any]:
    answer = httpx.post(f"{base_url}/inference/v1/generate", json=body(prompt_ids, num_tokens, **sampling), timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def captured_logprobs(choice: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])


@torch.no_grad()
def forward_logprobs(
    model: torch.nn.Module, prompt_ids: list[int], completion_ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    ids = torch.tensor([prompt_ids + completion_ids])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0]


def difference(
    model: torch.nn.Module, prompt_ids: list[int], choice: dict[str, Any], temperature: float = 1.0
) -> float:
    want = forward_logprobs(model, prompt_ids, choice["token_ids"], temperature)
    return float((captured_logprobs(choice) - want).abs().max())


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)


def publish(transfer: ShmWeightTransfer, model: torch.nn.Module, version: int) -> None:
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(model.named_parameters())
    transfer.resume()


def test_logprobs_stay_exact_over_two_updates(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module
) -> None:
    publish(transfer, policy, 1)  # an earlier test may have left other weights
    for version in (1, 2, 3):
        choice = sample(tiny_engine.base_url, prompt(0))
        assert difference(policy, prompt(0), choice) < TOLERANCE
        assert choice["weight_versions"] == [{"version": f"v{version}", "start": 0, "end": 64}]
        before = forward_logprobs(policy, prompt(0), choice["token_ids"])
        perturb(policy, version)
        # The test can fail: the new policy is far from the old one.
        assert (forward_logprobs(policy, prompt(0), choice["token_ids"]) - before).abs().max() > 0.1
        publish(transfer, policy, version + 1)


@pytest.mark.parametrize("only", ["embed_tokens", "q_proj", "norm"])
def test_a_change_of_one_kind_of_weight_reaches_the_engine(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module, only: str
) -> None:
    publish(transfer, policy, 1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if only in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    publish(transfer, policy, 2)
    assert difference(policy, prompt(1), sample(tiny_engine.base_url, prompt(1))) < TOLERANCE


def test_logprobs_are_of_the_sampling_distribution(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module
) -> None:
    publish(transfer, policy, 1)
    choice = sample(tiny_engine.base_url, prompt(2), temperature=0.6)
    assert difference(policy, prompt(2), choice, temperature=0.6) < TOLERANCE
    assert difference(policy, prompt(2), choice, temperature=1.0) > 0.05


def test_a_request_that_runs_through_an_update_is_exact_on_both_sides_of_it(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module, tmp_path: Path
) -> None:
    publish(transfer, policy, 1)
    perturb(policy, 7)
    started, result = Event(), {}

    def stream() -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        request = {**body(prompt(3), NUM_LONG), "stream": True}
        url = f"{tiny_engine.base_url}/inference/v1/generate"
        with httpx.stream("POST", url, json=request, timeout=120) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if not chunk.get("choices"):
                    result["error"] = chunk
                    continue
                choice = chunk["choices"][0]
                ids += choice["token_ids"]
                logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                result["versions"] = choice["weight_versions"]
                if len(ids) >= NUM_BEFORE:
                    started.set()
        result["ids"], result["logprobs"] = ids, logprobs

    thread = Thread(target=stream)
    thread.start()
    assert started.wait(60)
    publish(transfer, policy, 2)
    thread.join(120)

    assert "error" not in result, result["error"]
    old, new = result["versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("v1", 0, "v2", NUM_LONG)
    boundary = old["end"]
    assert boundary == new["start"]
    assert NUM_BEFORE <= boundary < NUM_LONG
    captured = torch.tensor(result["logprobs"])
    first = AutoModelForCausalLM.from_pretrained(tiny_engine.model_path, dtype=torch.float32)
    first.load_state_dict(load_file(tmp_path / "kept" / "v1.safetensors"), strict=False)
    old_logprobs = forward_logprobs(first, prompt(3), result["ids"])
    assert (captured - old_logprobs)[:boundary].abs().max() < TOLERANCE
    # The pause drops every cached key and value, so the rest is exact under the new policy over the *whole* row.
    new_logprobs = forward_logprobs(policy, prompt(3), result["ids"])
    print(
        f"\nupdate at token {boundary} of {NUM_LONG}: largest difference before "
        f"{(captured - old_logprobs)[:boundary].abs().max():.1e}, after "
        f"{(captured - new_logprobs)[boundary:].abs().max():.1e}, of the old policy after "
        f"{(captured - old_logprobs)[boundary:].abs().max():.2f}"
    )
    assert (captured - new_logprobs)[boundary:].abs().max() < TOLERANCE
    assert (captured - old_logprobs)[boundary:].abs().max() > 0.1


def test_a_refused_update_leaves_engine_and_version_as_they_were(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module
) -> None:
    publish(transfer, policy, 1)
    for wrong in ({"model.norm.weight": torch.zeros(7)}, {"model.norm.wight": torch.zeros(128)}):
        transfer.next_version(2)
        transfer.pause()
        with pytest.raises(TrainingFailed, match="weights are unchanged"):
            transfer.send_weights(wrong.items())
    choice = sample(tiny_engine.base_url, prompt(4))
    assert choice["weight_versions"][0]["version"] == "v1"
    assert difference(policy, prompt(4), choice) < TOLERANCE
    perturb(policy, 9)
    publish(transfer, policy, 3)
    assert difference(policy, prompt(4), sample(tiny_engine.base_url, prompt(4))) < TOLERANCE


def test_an_incomplete_layer_is_refused_and_the_next_update_mends_it(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module
) -> None:
    publish(transfer, policy, 1)
    partial = [(name, p) for name, p in policy.named_parameters() if "layers.0.self_attn.k_proj" not in name]
    transfer.next_version(2)
    with pytest.raises(TrainingFailed, match=r"qkv_proj received only a part"):
        transfer.send_weights(partial)
    mixed = sample(tiny_engine.base_url, prompt(5), 4)
    assert mixed["weight_versions"][0]["version"] == "v2-partial"
    publish(transfer, policy, 3)
    assert difference(policy, prompt(5), sample(tiny_engine.base_url, prompt(5))) < TOLERANCE


def test_an_update_left_open_by_a_dead_trainer_is_taken_over(
    tiny_engine: Any, transfer: ShmWeightTransfer, policy: torch.nn.Module
) -> None:
    for path in ("pause?mode=keep", "start_weight_update"):
        assert httpx.post(f"{tiny_engine.base_url}/{path}", timeout=60).status_code == 200
    transfer.init_weight_transfer()  # the engine stays paused: half of the dead trainer's weights may be in it
    publish(transfer, policy, 8)
    assert difference(policy, prompt(6), sample(tiny_engine.base_url, prompt(6))) < TOLERANCE
