"""Is what was trained exactly what the model did? An audit of a finished run.

    make demo ARGS="--keep-weights true"
    .venv/bin/python -m benchmarks.exactness runs/demo

Recomputes the log-probability of every trained token with a plain Transformers forward pass in float32, under the
weights of the policy version that sampled it, and prints the largest difference from the captured one. Tokens sampled
after an update in the middle of their reply are measured apart and not judged: whether they are exact depends on what
the engine does with older keys and values. Exit code 1 when the largest judged difference is not below `--limit`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from harness_trainer.display import cell
from harness_trainer.learner.exactness import Exactness, check_row
from harness_trainer.learner.rows import rows_from_trace
from harness_trainer.learner.weight_transfer import version_name
from harness_trainer.progress import read_metrics
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir


def policy_loader(model_path: Path, weights: Path) -> Callable[[int], Any]:
    """version -> the model with the weights that were published under it, two kept at a time."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    @lru_cache(maxsize=2)
    def load(version: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
        missing, unexpected = model.load_state_dict(
            load_file(weights / f"{version_name(version)}.safetensors"), strict=False
        )
        model.tie_weights()
        left = [name for name in missing if name != "lm_head.weight"]
        if left or unexpected:
            raise SystemExit(f"the kept weights of v{version} do not fit the model: {left[:3]} {unexpected[:3]}")
        return model.eval()

    return load


def audit(run_dir: Path) -> tuple[Exactness, int]:
    """The differences over every trained token of the run, and the number of rows."""
    run = RunDir(run_dir)
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    learner = json.loads((run.internal / "learner.json").read_text(encoding="utf-8"))
    model_of = policy_loader(Path(learner["model_path"]), run.weights)
    total, num_rows = Exactness(), 0
    store = RolloutStore(run.store)
    try:
        for report in read_metrics(run.metrics):
            for result in store.trained_results(report["step"]):
                for row in rows_from_trace(result.trace).rows if result.trace else []:
                    total.merge(check_row(row, model_of, config["rollouts"]["temperature"]))
                    num_rows += 1
    finally:
        store.close()
    return total, num_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--limit", type=float, default=1e-3, help="largest difference allowed, in nats")
    options = parser.parse_args()
    found, num_rows = audit(options.run_dir)
    print(f"{num_rows} rows, {found.num_same} tokens judged: largest difference {cell(found.same_max_diff)} nats")
    print(f"{found.num_mixed} tokens after an update in the middle of their turn: {cell(found.mixed_max_diff)} nats")
    return 0 if found.same_max_diff is not None and found.same_max_diff < options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
