"""A white-box conversation with a real vLLM, by HTTP through the gateway and in process: the same rows.

The model is tiny and random under Qwen3's real tokenizer; a seed makes both conversations the same.
"""

from __future__ import annotations

import pytest
from family_models import make_family_model
from test_token_in import TOOL, no_white_space, shared_load

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.rendering import Bridging
from capture_proxy.types import SessionPolicy
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.loops.base import Tool, ToolReply
from tests.capture.rendering_cases import FAMILIES, tokenizer_folder
from tests.loops.both_ways import by_http, in_process, rows
from tests.loops.playing import Game

OPENING = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Look around."}]
NUM_TURNS = 5

pytestmark = pytest.mark.engine


def shell():
    """Over after so many turns: a model that must call a tool never stops by itself."""

    async def run(arguments):
        game.num += 1
        return ToolReply(f"ok {game.num}", done=game.num == NUM_TURNS)

    function = TOOL["function"]
    game = Game([Tool(function["name"], function["description"], function["parameters"], run)])
    game.num = 0
    return game


async def test_both_ways_give_the_same_rows_and_one_row_an_episode(tmp_path, engine_environment):
    tokenizer = tokenizer_folder(FAMILIES["qwen3"], tmp_path)
    model = make_family_model("qwen3", tokenizer, tmp_path / "model")
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1, tool_call_parser="hermes")
    bridging = Bridging("auto", "qwen3", load=shared_load)
    bias = no_white_space("qwen3", model.path)
    policy = SessionPolicy(sampling={"temperature": 1.0, "seed": 7, "logit_bias": bias}, max_tokens=96, max_turns=20)
    with Engine(config, model=model, log_path=tmp_path / "engine.log", registry=tmp_path / "owned") as running:
        captures = [
            await way(
                VllmEngine(running.base_url), tmp_path, OPENING, shell(), bridging, policy, tool_choice="required"
            )
            for way in (by_http, in_process)
        ]
    http, own = map(rows, captures)
    for row in http:  # a prompt that is in the prefix cache sums differently
        row["logps"] = pytest.approx(row["logps"], abs=1e-3)
    assert own == http
    assert len(own) == 1 and len(own[0]["turns"]) == NUM_TURNS
