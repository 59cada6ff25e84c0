"""A white-box conversation with a real vLLM, by HTTP through the gateway and in process: the same rows.

The model is tiny and random under Qwen3's real tokenizer; a seed makes both conversations the same. It calls no tools
by itself, so the loop goes on from whatever was sampled.
"""

from __future__ import annotations

import pytest
from family_models import make_family_model
from test_token_in import TOOL, shared_load

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.rendering import Bridging
from capture_proxy.types import SessionPolicy
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from tests.capture.rendering_cases import FAMILIES, tokenizer_folder
from tests.loops.both_ways import by_http, in_process, rows

NUM_TURNS = 5

pytestmark = pytest.mark.engine


async def play(model):
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Look around."}]
    for turn in range(NUM_TURNS):
        reply = await model.chat(messages, [TOOL])
        messages += [reply.message, {"role": "user", "content": f"Go on, {turn}."}]


async def test_both_ways_give_the_same_rows_and_one_row_an_episode(tmp_path, engine_environment):
    tokenizer = tokenizer_folder(FAMILIES["qwen3"], tmp_path)
    model = make_family_model("qwen3", tokenizer, tmp_path / "model")
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1, tool_call_parser="hermes")
    bridging = Bridging("auto", "qwen3", load=shared_load)
    policy = SessionPolicy(sampling={"temperature": 1.0, "seed": 7}, max_tokens=12, max_turns=20)
    with Engine(config, model=model, log_path=tmp_path / "engine.log", registry=tmp_path / "owned") as running:
        captures = [
            await way(VllmEngine(running.base_url), tmp_path, play, bridging, policy) for way in (by_http, in_process)
        ]
    http, own = map(rows, captures)
    assert len(own) == 1 and len(own[0]["turns"]) == NUM_TURNS
    for name in http[0]:
        expected = [row[name] for row in http]
        if name == "logps":  # a prompt that is in the prefix cache sums differently
            expected = [pytest.approx(logps, abs=1e-3) for logps in expected]
        assert [row[name] for row in own] == expected, name
