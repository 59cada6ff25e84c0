"""The same environment classes and reward functions under TRL's own synchronous `GRPOTrainer`, without a change.

The trainer is TRL's, its tool loop and its step too; only what the model would say is scripted. What reward functions
see and give there is compared with what they see and give here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness_trainer.loops.base import LoopLimits
from harness_trainer.loops.loading import load_target
from harness_trainer.loops.tool_loop import run_episode
from tests.engine.tiny_model import make_tiny_model
from tests.loops.class_playing import GUIDE, PROMPT, guide
from tests.loops.playing import SayingModel, calls, says

TURN = "<|im_start|>assistant"
KNOWS = "I know."  # begins the replies of every second player


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model with the chat template of Qwen3, which TRL knows how to parse."""
    import trl

    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    (path / "chat_template.jinja").write_text(template.read_text())
    return path


def as_text(turn):
    """A scripted turn as the model's tokens spell it."""
    text, *functions = turn
    spelled = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in functions]
    return "\n".join([text, *(f"<tool_call>\n{call}\n</tool_call>" for call in spelled)])


def as_message(turn):
    text, *functions = turn
    return {**calls(*functions), "content": text} if functions else says(text)


def trained(model, environment_factory, reward_funcs, rows, players, out):
    """One step of TRL's trainer on these rows, each played by the two players."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, has_tool_images=False):
            said = []
            for i, ids in enumerate(prompt_ids):
                text = self._tokenizer.decode(ids)
                turn = text.count(TURN) - 1
                script = players[(i % 2) if turn == 0 else int(KNOWS not in text)]
                said.append([*self._tokenizer(as_text(script[turn]))["input_ids"], self._tokenizer.eos_token_id])
            return said, None

    args = GRPOConfig(
        output_dir=str(out),
        max_steps=1,
        per_device_train_batch_size=2 * len(rows),
        num_generations=2,
        max_completion_length=1024,
        chat_template_kwargs={"enable_thinking": False},
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        shuffle_dataset=False,
    )
    trainer = Scripted(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward_funcs,
        environment_factory=environment_factory,
    )
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    changed = any(not torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    return log, changed


async def scored_here(environment, players):
    """The rewards by name of every row and player, in the order of TRL's batch."""
    rewards = []
    async with environment:
        for task in await environment.tasks():
            for player in players:
                async with environment.episode(task, "r") as episode:
                    model = SayingModel(*map(as_message, player))
                    ended = await run_episode(episode, await episode.start(), model, LoopLimits())
                    rewards.append((await episode.rewards(ended.transcript)).by_name)
    return rewards


def plain(messages):
    """What both loops say of a message; ids of calls are ours alone."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []],
        )
        for message in messages
    ]


GUESS, SECOND, SLATE = (("guess", {"guess": word}) for word in ("[crane]", "[again]", "[slate]"))
CASES = {
    "EchoToolEnv": (
        ["reward_func"],
        [{"prompt": PROMPT}],
        [[[KNOWS, ("echo", {"message": "Hello World!"})], ["Done."]], [["", ("echo", {"message": "Hi"})], ["Done."]]],
    ),
    "WordleEnv": (
        ["reward_win", "reward_partial"],
        [{"prompt": PROMPT, "secret": "crane"}],
        [[[KNOWS, GUESS], ["", SECOND], ["Won."]], [["", SLATE, GUESS, SECOND], ["Lost."]]],
    ),
    "MultiEnv": (
        ["wordle_reward", "catch_reward"],
        [{"prompt": PROMPT, "env": "wordle"}, {"prompt": PROMPT, "env": "catch"}],
        [
            [[KNOWS, ("guess", {"guess": "crane"}), ("move", {"direction": "right"})], ["Done."]],
            [["", ("move", {"direction": "left"})], ["Done."]],
        ],
    ),
    "ENVIRONMENTS": (
        ["says_nothing"],
        [{"prompt": PROMPT, "environment": "catch", "start": 1}],
        [
            [[KNOWS, ("move", {"direction": "right", "steps": 1})], ["Done."]],
            [["", ("move", {"direction": "left"})], ["Done."]],
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_class_trains_a_step_under_trls_trainer_and_earns_the_same_here(tmp_path, model, name, monkeypatch):
    functions, rows, players = CASES[name]
    module_functions = [load_target(f"{GUIDE}:{function}") for function in [*functions, "keep"]]
    seen = load_target(f"{GUIDE}:SEEN")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    seen.clear()
    factory = load_target(f"{GUIDE}:{name}")
    log, changed = trained(model, factory, module_functions, rows, players, tmp_path / "out")
    there = list(seen)
    seen.clear()
    rewards = await scored_here(guide(tmp_path, name, *functions, "keep", rows=rows), players)
    assert changed, "the step changed the weights"
    assert len(there) == len(seen) == 2 * len(rows)
    for one, other in zip(there, seen, strict=True):
        assert plain(one["prompt"]) == plain(other["prompt"])
        assert plain(one["completion"]) == plain(other["completion"])
    for reward in {name for by_name in rewards for name in by_name}:
        said = [by_name[reward] for by_name in rewards if by_name[reward] is not None]
        if said:
            assert log[f"rewards/{reward}/mean"] == pytest.approx(sum(said) / len(said), abs=1e-6)
    totals = [sum(value for value in by_name.values() if value is not None) for by_name in rewards]
    assert log["reward"] == pytest.approx(sum(totals) / len(totals), abs=1e-6)
