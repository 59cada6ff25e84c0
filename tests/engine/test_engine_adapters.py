"""LoRA on a real vLLM: adapters by name, exact log-probabilities, calls in flight keep theirs, old ones go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import peft
import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from capture_proxy.engines.base import ChatRequest, FinishEvent, PromptEvent
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.types import VersionSpan
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.adapter_transfer import AdapterTransfer
from harness_trainer.learner.sync_config import LoraConfig
from harness_trainer.learner.trl_compat import peft_config

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine_environment")]

LORA = LoraConfig(rank=4, alpha=8)
PROMPT = list(range(3, 60))


class Policy:
    """The trainer's side: a base model with an adapter, changed at random for each version."""

    def __init__(self, path: Path, transfer: AdapterTransfer) -> None:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model = peft.get_peft_model(base, peft_config(LORA)).eval()
        self.transfer = transfer

    @torch.no_grad()
    def publish(self, version: int) -> None:
        torch.manual_seed(version)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        self.model.save_pretrained(self.transfer.folder_of(version))
        self.transfer.next_version(version)
        self.transfer.publish(version)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        row = torch.tensor([PROMPT + ids])
        logits = self.model(row).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(1, row[0, len(PROMPT) :, None])[:, 0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("lora")
    model = make_tiny_model(folder / "model", family="qwen3", tied=True)
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1, max_loras=3, max_lora_rank=LORA.served_rank)
    with Engine(config, model=model, log_path=folder / "log", registry=folder / "owned") as engine:
        yield engine


@pytest.fixture
def policy(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    transfer = AdapterTransfer(engine.base_url, directory=tmp_path_factory.mktemp("shm"))
    transfer.init_weight_transfer()
    yield Policy(engine.model.path, transfer)
    transfer.destroy()


def body(name: str, num_tokens: int) -> dict[str, Any]:
    params = {"max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    return {"model": name, "token_ids": PROMPT, "sampling_params": params}


def difference(policy: Policy, choice: dict[str, Any]) -> float:
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return float((got - policy.logprobs(choice["token_ids"])).abs().max())


def served(engine: Engine) -> list[str]:
    models = httpx.get(f"{engine.base_url}/v1/models", timeout=30).json()["data"]
    return sorted(model["id"] for model in models if model["parent"])


def test_log_probabilities_are_exact_under_each_adapter(engine: Engine, policy: Policy) -> None:
    for version in (1, 2):
        policy.publish(version)
        answer = httpx.post(
            f"{engine.base_url}/inference/v1/generate", json=body(f"v{version}", 32), timeout=120
        ).json()
        assert answer["model"] == f"v{version}"
        assert difference(policy, answer["choices"][0]) < 1e-3
    other = httpx.post(f"{engine.base_url}/inference/v1/generate", json=body("v1", 32), timeout=120).json()
    assert difference(policy, other["choices"][0]) > 0.05  # the test can fail: v1 is another policy


def test_a_call_in_flight_keeps_its_adapter_which_goes_only_after_it(engine: Engine, policy: Policy) -> None:
    policy.publish(3)
    started, result = Event(), {"ids": [], "logprobs": []}

    def stream() -> None:
        asked = {**body("v3", 1500), "stream": True}
        with httpx.stream("POST", f"{engine.base_url}/inference/v1/generate", json=asked, timeout=300) as response:
            for line in response.iter_lines():
                chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                for choice in chunk.get("choices") or []:
                    result["ids"] += choice["token_ids"]
                    result["logprobs"] += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                    if len(result["ids"]) >= 20:
                        started.set()

    thread = Thread(target=stream)
    thread.start()
    assert started.wait(120)
    for version in (4, 5, 6):
        policy.publish(version)
    assert len(result["ids"]) < 1500, "the call ended before the adapters changed"
    assert "v3" in served(engine) and "v4" not in served(engine)
    thread.join(300)
    assert len(result["ids"]) == 1500
    policy.publish(7)
    assert served(engine) == ["v6", "v7"]
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    want = policy.logprobs(result["ids"])
    assert (torch.tensor(result["logprobs"]) - want).abs().max() < 1e-3


def test_the_gateways_engine_samples_with_the_newest_and_says_so(engine: Engine, policy: Policy) -> None:
    policy.publish(8)

    async def ask() -> tuple[list[int], FinishEvent]:
        vllm = VllmEngine(engine.base_url, adapters=True)
        request = ChatRequest("m", [{"role": "user", "content": "hello"}], [], None, {"temperature": 1.0}, 12)
        async with vllm.running():
            events = [event async for event in vllm.sample(request)]
        assert isinstance(events[0], PromptEvent) and isinstance(events[-1], FinishEvent)
        return [i for event in events[1:-1] for i in event.ids], events[-1]  # type: ignore[union-attr]

    ids, finish = asyncio.run(ask())
    assert finish.version_spans == [VersionSpan("v8", 0, len(ids))] and ids


def test_an_adapter_that_does_not_fit_is_refused_with_vllms_reason(engine: Engine, policy: Policy) -> None:
    folder = policy.transfer.folder_of(20)
    model = AutoModelForCausalLM.from_pretrained(engine.model.path)
    peft.get_peft_model(model, peft_config(LoraConfig(rank=64))).save_pretrained(folder)
    with pytest.raises(TrainingFailed, match=r"loading adapter v20 failed.*rank 64"):
        policy.transfer.publish(20)
