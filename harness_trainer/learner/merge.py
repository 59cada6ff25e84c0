"""An adapter folded into its base model: `python -m harness_trainer.learner.merge BASE ADAPTER OUT`.

A process of its own, because it needs torch and the memory of a whole model; `final_model` starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Write weights and config; the base's precision is kept. The class is the one that the learner trains."""
    import peft

    from harness_trainer.learner.trl_compat import trl_utils

    dtype = json.loads((base / "config.json").read_text(encoding="utf-8")).get("dtype", "auto")
    model = trl_utils.create_model_from_path(str(base), device_map=None, dtype=dtype)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:4]))
