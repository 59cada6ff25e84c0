"""Two processes train what one trains: whole copies (DDP) or shards (FSDP2), over gloo, with our accelerate files.

The processes are real; `several_processes` imports TRL once and forks them. `test_launched_learner` starts them by
`accelerate launch`, as a run does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("several_processes.py")
ROOT = SCRIPT.parents[2]
LAYOUTS = ("ddp", "fsdp2")
TOLERANCE = 1e-6  # of weights and of what is reported, in float32
# How rows are packed, and so what is forwarded twice, depends on the number of processes; times are nobody's.
PACKING = {"forwarded_tokens", "num_micro_batches"}


class Ran:
    """What an order left in its folder."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    @property
    def reports(self) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = json.loads((self.folder / "reports.json").read_text())
        return reports

    def policies(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights, or adapters, by the version that they were published as."""
        whole = {path.stem: load_file(path) for path in self.folder.glob("v*.safetensors")}
        adapters = self.folder.glob("adapters/v*/adapter_model.safetensors")
        return whole | {path.parent.name: load_file(path) for path in adapters}

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"checkpoint-{step}"

    def error(self, rank: int) -> str | None:
        path = self.folder / f"rank{rank}.error"
        return path.read_text() if path.exists() else None

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()


class Forks:
    def __init__(self, process: subprocess.Popen[str], model: Path) -> None:
        self._process, self._model = process, model

    def run(self, folder: Path, num_processes: int, *, fails: bool = False, **order: Any) -> Ran:
        folder.mkdir(parents=True, exist_ok=True)
        order = {"model": str(self._model), "folder": str(folder), "num_processes": num_processes, **order}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        ran = Ran(folder, json.loads(self._process.stdout.readline()))
        if not fails:
            assert not any(ran.codes), "\n".join(ran.log(rank)[-3000:] for rank in range(num_processes))
        return ran


@pytest.fixture(scope="module")
def forks(tiny_model: Path) -> Iterator[Forks]:
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdin=pipe, stdout=pipe, text=True, env=env) as process:
        yield Forks(process, tiny_model)
        assert process.stdin is not None
        process.stdin.close()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def same_run(one: Ran, other: Ran, tolerance: float = TOLERANCE) -> None:
    policies, others = one.policies(), other.policies()
    assert sorted(policies) == sorted(others) and len(policies) == len(one.reports) + 1
    first, last = policies["v1"], policies[f"v{len(policies)}"]
    assert largest_difference(first, last) > 1e-4  # it did learn
    for version, weights in policies.items():
        assert largest_difference(weights, others[version]) < tolerance, version
    for mine, theirs in zip(one.reports, other.reports, strict=True):
        for name, value in mine.items():
            if name not in PACKING and name != "metrics" and not name.endswith("_s"):
                same = pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value
                assert theirs[name] == same, name
        assert mine["metrics"].keys() == theirs["metrics"].keys()
        for name in ("ratio_max", "aux_loss", "batch/trained_tokens_per_step", "batch/groups_per_step"):
            if name in mine["metrics"]:
                assert theirs["metrics"][name] == pytest.approx(mine["metrics"][name], rel=1e-5), name


CASES: dict[str, dict[str, Any]] = {
    # The step is the gradient itself: clipping or Adam would hide that it is twice as long.
    "sgd": {"config": {"optimizer": "sgd", "max_grad_norm": 0}},
    "adam": {"config": {"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1}},
    "one_micro_batch": {"config": {"optimizer": "sgd", "groups_per_step": 1}, "num_rows": 1, "num_rollouts": 2},
    "reference_and_recomputed_activations": {
        "config": {
            "optimizer": "sgd",
            "max_grad_norm": 0,
            "gradient_checkpointing": True,
            "objective": {"kl_coef": 0.1},
        }
    },
    "gspo_spread": {
        "config": {
            "optimizer": "sgd",
            "max_grad_norm": 0,
            "token_budget": 14,
            "objective": {"loss": "gspo", "aggregation": "rollout_mean"},
        }
    },
    "lora": {"config": {"optimizer": "sgd", "max_grad_norm": 0, "lora": {"rank": 4}, "objective": {"kl_coef": 0.1}}},
    "lora_adapter": {"config": {"lora": {"rank": 4}, "weight_sync": {"type": "lora"}}},
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_two_processes_are_those_of_one(forks: Forks, tmp_path: Path, case: str) -> None:
    one = forks.run(tmp_path / "one", 1, **CASES[case])
    for layout in LAYOUTS:
        two = forks.run(tmp_path / layout, 2, layout=layout, **CASES[case])
        same_run(one, two)
        if case == "one_micro_batch":  # a pass of nothing is no micro-batch, and counts nowhere
            assert [r["num_micro_batches"] for r in two.reports] == [2, 2, 2]
        if case == "gspo_spread":
            assert min(r["num_micro_batches"] for r in one.reports) > 3


def test_an_odd_micro_batch_leaves_the_other_process_a_pass_of_nothing(forks: Forks, tmp_path: Path) -> None:
    config = {"optimizer": "sgd", "max_grad_norm": 0, "token_budget": 7, "groups_per_step": 1}
    case: dict[str, Any] = {"config": config, "num_rows": 1}
    one = forks.run(tmp_path / "one", 1, **case)
    assert [report["num_micro_batches"] for report in one.reports] == [3, 3, 3]
    for layout in LAYOUTS:
        two = forks.run(tmp_path / layout, 2, layout=layout, **case)
        same_run(one, two)
        assert [r["num_micro_batches"] for r in two.reports] == [r["num_micro_batches"] for r in one.reports]


BFLOAT16: dict[str, dict[str, Any]] = {
    "all": {"optimizer": "sgd", "max_grad_norm": 0, "gradient_checkpointing": True, "objective": {"kl_coef": 0.1}},
    "adapter": {"learning_rate": 1e-3, "lora": {"rank": 4}},
}


@pytest.mark.parametrize("case", BFLOAT16)
def test_bfloat16_trains_in_any_layout(forks: Forks, tmp_path: Path, case: str) -> None:
    config = {**BFLOAT16[case], "dtype": "bfloat16"}
    one = forks.run(tmp_path / "one", 1, config=config)
    start, wanted = one.policies()["v1"], one.policies()["v4"]
    for layout in LAYOUTS:
        two = forks.run(tmp_path / layout, 2, layout=layout, config=config)
        found = two.policies()["v4"]
        # Under an adapter the base is frozen, and needs no more digits.
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16 if "lora" in config else torch.float32}
        # FSDP2 puts weights together in bfloat16, norms and embedding too, which autocast computes in float32.
        assert largest_difference(wanted, found) < largest_difference(start, wanted) / 4
        mine, theirs = one.reports[0], two.reports[0]
        assert theirs["ratio_mean"] == pytest.approx(mine["ratio_mean"], rel=5e-3)
        if "objective" in config:  # the reference computes as the model does
            assert theirs["kl_reference"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_bfloat16_trains_weights_of_float32(forks: Forks, tmp_path: Path, layout: str) -> None:
    """An update of the learning rate is far below what a weight of bfloat16 can hold."""
    config = {"dtype": "bfloat16", "learning_rate": 1e-5}
    ran = (
        forks.run(tmp_path, 1, config=config)
        if layout == "one"
        else forks.run(tmp_path, 2, layout=layout, config=config)
    )
    first, last = ran.policies()["v1"], ran.policies()["v4"]
    changed = sum((last[name] != first[name]).sum().item() for name in first)
    assert changed / sum(tensor.numel() for tensor in first.values()) > 0.99  # as with float32
    assert {tensor.dtype for tensor in load_file(ran.checkpoint(3) / "model.safetensors").values()} == {torch.float32}
    moments = torch.load(ran.checkpoint(3) / "optimizer.pt")["state"]
    assert {value.dtype for values in moments.values() for value in values.values()} == {torch.float32}


@pytest.mark.parametrize("adapter", [False, True])
def test_a_checkpoint_continues_with_any_number_of_processes(forks: Forks, tmp_path: Path, adapter: bool) -> None:
    config = {"learning_rate": 1e-3, "warmup_steps": 2, "save_steps": 1, "save_total_limit": None}
    if adapter:
        config |= {"lora": {"rank": 4}, "weight_sync": {"type": "lora"}}
    whole = forks.run(tmp_path / "whole", 1, config={**config, "max_steps": 3})
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    wanted = load_file(whole.checkpoint(3) / weights)
    layouts = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp2": (2, "fsdp2")}
    pairs = {"one": ["fsdp2"], "ddp": ["one"], "fsdp2": ["fsdp2", "ddp", "one"]}
    for name, others in pairs.items():
        size, layout = layouts[name]
        began = forks.run(tmp_path / name, size, layout=layout, config={**config, "max_steps": 2})
        saved = load_file(began.checkpoint(2) / weights)
        assert largest_difference(saved, load_file(whole.checkpoint(2) / weights)) < TOLERANCE
        files = {path.name for path in began.checkpoint(2).iterdir()}
        assert files - {f"rng_state_{rank}.pth" for rank in (0, 1)} == {
            path.name for path in whole.checkpoint(2).iterdir()
        } - ({"rng_state.pth"} if size > 1 else set())
        for other in others:
            size, layout = layouts[other]
            folder = tmp_path / f"{name}-{other}"
            shutil.copytree(began.folder, folder)
            went_on = forks.run(folder, size, layout=layout, config={**config, "max_steps": 3}, resume=True)
            assert [report["step"] for report in went_on.reports] == [3]
            assert went_on.reports[0]["learning_rate"] == whole.reports[2]["learning_rate"]
            assert largest_difference(load_file(went_on.checkpoint(3) / weights), wanted) < TOLERANCE, (name, other)


def test_a_sharded_checkpoint_is_a_model_that_others_load(forks: Forks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ran = forks.run(tmp_path, 2, layout="fsdp2", config={"max_steps": 1})
    settings = json.loads((ran.checkpoint(1) / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(ran.checkpoint(1))
    policy = ran.policies()["v2"]
    assert largest_difference(dict(model.state_dict()), policy) == 0


def test_the_other_process_waits_for_groups_as_long_as_the_main_one_does(forks: Forks, tmp_path: Path) -> None:
    ran = forks.run(tmp_path, 2, config={"max_steps": 1}, wait_s=9, beat_s=1, timeout_s=4)
    assert [report["step"] for report in ran.reports] == [1]
    assert ran.reports[0]["wait_s"] > 8


def test_what_ends_the_main_process_ends_all_with_its_text(forks: Forks, tmp_path: Path) -> None:
    ran = forks.run(tmp_path, 2, fails=True, fault={"source": 4})
    assert ran.codes == [1, 1]
    assert ran.error(0) == "TrainingFailed: the rollout runner died: see logs/runner.log"
    assert "process 1 of the learner ends: the rollout runner died: see logs/runner.log" in ran.log(1)


def test_what_ends_another_process_ends_the_main_one_with_its_text(forks: Forks, tmp_path: Path) -> None:
    ran = forks.run(tmp_path, 2, fails=True, fault={"fails_at": 3})
    assert ran.codes == [1, 1]
    assert ran.error(0) == "PeerLost: process 1 of the learner failed: MemoryError: out of memory"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_process_that_is_killed_ends_the_others_soon(forks: Forks, tmp_path: Path, layout: str) -> None:
    """It is no error of the kind that ends a run: the supervisor starts the learner again."""
    other = forks.run(tmp_path / "other", 2, layout=layout, fails=True, fault={"dies_at": 3})
    assert other.codes == [1, -9]
    assert str(other.error(0)).startswith("PeerLost: another process of the learner is gone")
    main = forks.run(tmp_path / "main", 2, layout=layout, fails=True, fault={"main_dies_at": 2})
    assert main.codes == [-9, 1]
    assert "is gone" in main.log(1)


def test_a_process_that_falls_silent_ends_the_others_within_its_limit(forks: Forks, tmp_path: Path) -> None:
    ran = forks.run(tmp_path, 2, fails=True, fault={"stops_at": 3}, lost_after_s=4.0)
    assert ran.codes == [1, -9]  # the test's own kill of what was stopped
    # It waited for the other in a call that nothing interrupts.
    assert "process 0 of the learner ends: process 1 of the learner gave no sign of life for 4 s" in ran.log(0)


def test_a_sharded_mixture_is_sent_and_saved_by_its_checkpoint_s_names(
    forks: Forks, tmp_path: Path, build_model: Any
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = build_model(tmp_path / "model", family="qwen3_moe", tie=False, **sizes)
    base = load_file(model / "model.safetensors")
    ran = forks.run(tmp_path / "run", 2, model=str(model), layout="fsdp2", config={"max_steps": 1})
    first, last = ran.policies()["v1"], ran.policies()["v2"]
    assert first.keys() == last.keys() == load_file(ran.checkpoint(1) / "model.safetensors").keys() == base.keys()
    assert all(torch.equal(first[name], base[name]) for name in base)
    assert any("experts" in name and not torch.equal(last[name], base[name]) for name in base)


def test_what_fsdp2_cannot_shard_is_refused_before_a_step_is_taken(forks: Forks, tmp_path: Path) -> None:
    ran = forks.run(tmp_path, 2, layout="fsdp2", fails=True, config={"optimizer": "adafactor"})
    assert ran.codes == [1, 1] and not (tmp_path / "reports.json").exists()
    # Its own SetupError, or as TrainingFailed what the other process, which had it first, told it.
    assert "adafactor factors whole matrices, which FSDP2 shards" in str(ran.error(0))
