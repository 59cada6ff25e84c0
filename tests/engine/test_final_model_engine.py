"""The model of a run, as it is written at its end, serves in a real vLLM with the weights that were trained."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from harness_trainer.config import RunConfig
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import describe_model
from harness_trainer.learner.checkpoints import HarnessState, write_state
from harness_trainer.learner.final_model import write_final_model
from harness_trainer.rundir import RunDir

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine_environment")]


def test_the_final_model_samples_in_vllm_what_transformers_computes(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", family="qwen3", tied=True)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    run = RunDir(tmp_path / "run")
    with run.opened(RunConfig(model=str(base.path)).model_dump(mode="json")):
        checkpoint = run.checkpoints / "checkpoint-1"
        model.save_pretrained(checkpoint)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (checkpoint / name).touch()
        (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
        write_state(checkpoint, HarnessState(1, 2))
        folder = write_final_model(run, base.path)

    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1)
    info = describe_model(folder, "final")
    prompt = list(range(3, 40))
    with Engine(config, model=info, log_path=tmp_path / "log", registry=tmp_path / "owned") as engine:
        sampling = {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling}
        choice = httpx.post(f"{engine.base_url}/inference/v1/generate", json=body, timeout=120).json()["choices"][0]
        chat = {"model": "final", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{engine.base_url}/v1/chat/completions", json=chat, timeout=120)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    ids = torch.tensor([prompt + choice["token_ids"]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, len(prompt) - 1 : -1]
    want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert (got - want).abs().max() < 1e-3
