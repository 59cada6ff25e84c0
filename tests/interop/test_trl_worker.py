"""TRL's own trainer and its own harness worker, taking a step from agents in our sandboxes behind our gateway."""

import asyncio
from collections import Counter
from functools import partial

import torch

from capture_proxy.engines.scripted import ScriptedEngine
from tests.capture.serving import served


class Kept:
    """Keeps every published set of weights, as an engine would."""

    def __init__(self):
        self.published = []

    def init_weight_transfer(self):
        self.published.clear()

    def pause(self):
        self.published.append({})

    def send_weights(self, iterator):
        self.published[-1].update({name: tensor.detach().clone() for name, tensor in iterator})

    def resume(self):
        pass

    def destroy(self):
        pass


def trained(model, settings, addresses, output_dir):
    """Train for one step; the trainer, and the weights it published."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    from harness_trainer.interop import HarnessSessionFactory, prompt_rows
    from harness_trainer.learner.trl_compat import fit_trl_to_this_machine, use_attention_that_runs_here

    fit_trl_to_this_machine()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_schema = {"type": "object"}  # for TRL's own loop, which parses replies; here agents do
    dataset = Dataset.from_list(prompt_rows(settings["tasks"]))
    worker = HarnessRolloutWorker(
        harness_session_factory=partial(HarnessSessionFactory, **settings, **addresses),
        model_name=str(model),
        dataset=dataset,
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[1],
        num_generations=2,
        max_inflight_tasks=2,
    )
    args = AsyncGRPOConfig(
        output_dir=str(output_dir),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=2,
        learning_rate=1e-2,
        token_budget=0,  # unset, TRL would ask a vLLM for its window
        dtype="float32",
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    kept = Kept()
    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=kept,
    )
    use_attention_that_runs_here()
    trainer.train()
    return trainer, kept.published


async def test_trls_harness_worker_trains_a_step_from_our_agents(tmp_path, settings, build_model):
    """Of each task one agent is right and one wrong, so that there is something to prefer."""
    model = build_model(tmp_path / "model", vocab_size=300)  # the scripted engine's ids fit in
    asked = Counter()

    def reply(request):
        wanted = request.messages[-1]["content"]
        asked[wanted] += 1
        return "the moon" if asked[wanted] % 2 else "nothing"

    engine = ScriptedEngine(reply)
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        addresses = {"agent_url": gateway.agent_url, "admin_url": gateway.admin_url}
        trainer, published = await asyncio.to_thread(trained, model, settings, addresses, tmp_path / "out")
    assert trainer.state.global_step == 1
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert log["grad_norm"] > 0
    before, after = published[0], published[-1]
    assert any(not torch.equal(before[name], after[name]) for name in before), "the step changed the weights"
    assert sum(asked.values()) >= 2
    assert all(
        request.sampling["top_k"] in (-1, 0) and request.sampling["temperature"] == 1.0 for request in engine.requests
    )
    assert list((tmp_path / "boxes").glob("*")) == [], "the worker's process left no sandbox"
