"""The model of a finished run: whole, loadable, and with a card that says how it was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import yaml
from test_train import Run
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError, TrainingFailed
from harness_trainer.learner.final_model import ENGINE_VERSION, write_final_model
from harness_trainer.learner.model_card import CardFacts, model_card, public
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from harness_trainer.rundir import RunDir


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template of its own."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Run]:
    """A run of two steps, with a checkpoint of each."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "poems")
    config = RunConfig(model=str(base), tasks="examples", harness="pyagent", learner={"max_steps": 2})
    with run.opened(config.model_dump(mode="json")):
        learner = Run(base, run.checkpoints)
        learner.go(max_steps=2, save_steps=1, gradient_checkpointing=True)
        lines = [
            json.dumps({"step": s, "reward_mean": s / 4, "reward_std": 0.1, "trained_tokens": 1000}) for s in (1, 2)
        ]
        run.metrics.write_text("\n".join(lines) + "\n")
        store = RolloutStore(run.store)
        store.set_state(ENGINE_VERSION, "0.32.0")
        store.open_group(0, "task", "pyagent")
        store.start_rollout("r", 0, 0, 0)
        store.finish_rollout(RolloutResult("r", 0, "task", "pyagent", 0, Outcome.OK, 1.0), final=True)
        store.close()
    return run, learner


def card_of(folder: Path) -> tuple[dict, str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_model_loads_in_transformers_with_the_published_weights(finished: tuple[RunDir, Run], base: Path) -> None:
    run, learner = finished
    folder = write_final_model(run, base)
    assert folder == run.path / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, learner.transfer.weights[name]), name
    assert model.config.use_cache and model.generation_config is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w3 w4"}], tokenize=False) == "w3 w4"
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    ids = model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False)
    assert ids.shape == (1, 4)
    assert (folder / "generation_config.json").is_file() and list(folder.glob("*.safetensors"))
    assert not [path for path in run.path.iterdir() if path.name.startswith(".model")]


def test_the_card_says_how_it_was_trained_and_nothing_of_the_machine(finished: tuple[RunDir, Run], base: Path) -> None:
    run, _ = finished
    front, body = card_of(write_final_model(run, base))
    assert front["library_name"] == "transformers" and "base_model" not in front  # a folder is no name on the Hub
    for text in (
        "| Steps | 2, each on 2 groups of", "| Policy version | v3 |", "| Tasks | examples |",
        "| Agent (harness) | pyagent |", "| Trained tokens | 2,000 |", "| 1 | 0.250 | 0.100 |",
        "| 2 | 0.500 | 0.100 |", "ok 1", "- trl ", "- vllm 0.32.0", "max_steps: 2", "advantage",
    ):  # fmt: skip
        assert text in body, text
    assert str(base.parent) not in body and str(run.path) not in body


def test_saving_into_the_models_folder_changes_neither_base_nor_checkpoint(
    finished: tuple[RunDir, Run], base: Path, tmp_path: Path
) -> None:
    run, _ = finished
    folder = write_final_model(run, base, target=tmp_path / "out")
    sources = [path for where in (base, run.checkpoints / "checkpoint-2") for path in where.iterdir()]
    before = {path: path.read_bytes() for path in sources}
    for path in folder.iterdir():
        path.write_bytes(b"x")  # in place, as an editor, Transformers' `save_pretrained`, or safetensors until 0.7
    assert {path: path.read_bytes() for path in sources} == before


def test_an_earlier_checkpoint_can_be_asked_for_and_the_folder_is_replaced(
    finished: tuple[RunDir, Run], base: Path, tmp_path: Path
) -> None:
    run, _ = finished
    target = tmp_path / "out"
    write_final_model(run, base, target=target)
    (target / "left").touch()
    write_final_model(run, base, step=1, target=target)
    _, body = card_of(target)
    assert "| Policy version | v2 |" in body and "| 2 | 0.500" not in body
    assert not (target / "left").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_model_folder_is_not_replaced(finished: tuple[RunDir, Run], base: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no model folder"):
        write_final_model(finished[0], base, target=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_checkpoint_that_is_not_there_or_not_whole_is_named(
    finished: tuple[RunDir, Run], base: Path, tmp_path: Path
) -> None:
    run, _ = finished
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7 \(kept: checkpoint-1, checkpoint-2\)"):
        write_final_model(run, base, step=7)
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    (copy.checkpoints / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(TrainingFailed, match="not a complete checkpoint"):
        write_final_model(copy, base, step=2)
    shutil.rmtree(copy.checkpoints)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        write_final_model(copy, base)


def test_a_lora_run_gives_the_adapter_and_the_merged_model(base: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "lora-run")
    config = RunConfig(model=str(base), learner={"lora": {"rank": 4}})
    with run.opened(config.model_dump(mode="json")):
        learner = Run(base, run.checkpoints).go(max_steps=2, save_steps=1, lora=config.learner.lora)
        adapter = write_final_model(run, base, merge=False)
        merged = write_final_model(run, base)
    assert (adapter.name, merged.name) == ("adapter", "model")
    model = AutoModelForCausalLM.from_pretrained(merged)
    for name, tensor in model.state_dict().items():  # what the engine was sent, merged by the trainer
        torch.testing.assert_close(tensor, learner.transfer.weights[name], atol=1e-6, rtol=0)
    with_adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(with_adapter(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    front, body = card_of(adapter)
    assert front["library_name"] == "peft" and "This is a LoRA adapter" in body
    assert "adapter is merged" in card_of(merged)[1]
    assert str(base) not in "".join(path.read_text() for path in adapter.glob("*.json"))
    assert {path.name for path in adapter.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert (merged / "tokenizer.json").is_file() and (adapter / "tokenizer.json").is_file()


def facts(**changes: object) -> CardFacts:
    fields = {"run": "r", "step": 50, "policy_version": 51, "config": {"model": "Qwen/Qwen3-0.6B"}, "steps": []}
    return CardFacts(**{**fields, "outcomes": {}, "versions": {}, **changes})  # type: ignore[arg-type]


def test_a_base_model_of_the_hub_is_linked() -> None:
    assert "\nbase_model: Qwen/Qwen3-0.6B\n" in model_card(facts(on_hub=True))


def test_a_folder_that_is_named_like_one_of_the_hub_is_not(
    finished: tuple[RunDir, Run], base: Path, tmp_path: Path
) -> None:
    card = model_card(facts(config={"model": "models/foo"}))
    assert "base_model:" not in card and "# foo, trained" in card
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished[0].path, run.path)
    config = yaml.safe_load(run.config.read_text())
    run.config.write_text(yaml.safe_dump({**config, "model": "models/foo"}))
    assert "base_model" not in card_of(write_final_model(run, base))[0]
    cached = tmp_path / "hub" / "models--models--foo" / "snapshots" / "1a2b"
    shutil.copytree(base, cached)
    assert card_of(write_final_model(run, cached))[0]["base_model"] == "models/foo"


def test_many_steps_are_shown_in_stretches_and_unknown_rewards_are_not_zero() -> None:
    steps = [{"step": s, "reward_mean": None if s == 1 else 1.0, "reward_std": None} for s in range(1, 51)]
    rows = [line for line in model_card(facts(steps=steps)).splitlines() if " to " in line and "1.000" in line]
    assert rows[0] == "| 2 to 4 | 1.000 | not known |" and len(rows) == 16
    assert "No step of this run" in model_card(facts(steps=steps[:1]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/tasks", "tasks"),
        ("./mine/", "mine"),
        ("https://me:key@host.example/path?token=1", "https://host.example/path"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("examples", "examples"),
        ("/home/me/my tasks/", "my tasks"),
        ("cmd:/home/me/agent.sh --x", "cmd:agent.sh --x"),
        (
            "cmd:python ~/a/b.py --out=../c/d -I/opt/mine/include 'http://u:k@h:1/p?q'",
            "cmd:python b.py --out=d -Iinclude 'http://h:1/p'",
        ),
        ("file:/home/me/key", "file:key"),
        ("file:///home/me/key", "file:key"),
        ("harbor:/home/me/agent", "harbor:agent"),
        ("/home/me/a.py:Class", "a.py:Class"),
        ("openenv-harbor:http://u:p@host:8200/x", "openenv-harbor:http://host:8200/x"),
        ("and/or 1/2 owner/name@main", "and/or 1/2 owner/name@main"),
    ],
)
def test_only_what_is_public_is_shown(text: str, shown: str) -> None:
    assert public(text) == shown


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "computed in bfloat16, trained in float32"),
        ({"dtype": "bfloat16", "lora": {"rank": 4}}, "bfloat16, the adapter in float32"),
    ],
)
def test_the_card_says_what_was_computed_and_what_was_kept_in_which_precision(
    learner: dict[str, object], said: str
) -> None:
    card = model_card(facts(config=RunConfig(model="owner/name", learner=learner).model_dump(mode="json")))
    assert f"| Precision | {said} |" in card
