"""A checkpoint as a model that others can load: Hugging Face format, the base model's tokenizer, a card.

Owns which files belong to a model and that a reader finds a whole folder or none. No torch: the weights of a checkpoint
are in that format already, and merging an adapter is a process of its own. Called at the end of a run, and by
`harness-trainer model`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.learner.checkpoints import HarnessState, last_checkpoint, read_state
from harness_trainer.learner.model_card import CardFacts, base_name, model_card
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir, filesystem_errors, sync, sync_tree

ENGINE_VERSION = "engine_version"  # run-state key: the vLLM that sampled
_OF_CHECKPOINT = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
_OF_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# From the base model, byte for byte: what reads and writes text is not trained. (A checkpoint has its own rendering.)
_OF_BASE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.model",
    "chat_template*", "*processor_config.json",
)  # fmt: skip
_AT_ONCE = 1 << 30  # bytes of one call
_LIBRARIES = ("harness-trainer", "trl", "transformers", "torch", "accelerate", "peft", "openenv", "safetensors")


def write_final_model(
    run: RunDir, base_model: Path, *, step: int | None = None, target: Path | None = None, merge: bool = True
) -> Path:
    """Write the model of the run's newest checkpoint, or that of `step`; the folder that holds it.

    Of a run that trained an adapter it is the whole model with the adapter merged, or the adapter alone (`merge`
    False). `target` None = `model`, or `adapter`, in the run folder. What was there is replaced when the new folder is
    whole. Raises ConfigError when there is no such checkpoint or `target` holds something else, RunDirError when the
    disk does not take it, SetupError when the adapter cannot be merged.
    """
    checkpoint, state = _checkpoint(run, step)
    adapter = ("merged" if merge else "alone") if (checkpoint / "adapter_config.json").is_file() else ""
    target = target or run.path / ("adapter" if adapter == "alone" else "model")
    if target.exists() and not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{target} exists and is no model folder: name another folder")
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    with filesystem_errors(target.parent):
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
        fresh.mkdir(parents=True)
        if adapter == "merged":
            _merge(base_model, checkpoint, fresh)
        for source in _files(checkpoint, _OF_ADAPTER if adapter == "alone" else () if adapter else _OF_CHECKPOINT):
            _put(source, fresh / source.name)
        for source in _files(base_model, _OF_BASE):
            _put(source, fresh / source.name)
        facts = _facts(run, state, base_model, adapter)
        if adapter == "alone":
            _name_base(fresh, facts)
        else:
            _restore_settings(fresh, base_model)
        (fresh / "README.md").write_text(model_card(facts), encoding="utf-8")
        sync_tree(fresh)  # its name says that it is whole
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    return target


def _checkpoint(run: RunDir, step: int | None) -> tuple[Path, HarnessState]:
    found = last_checkpoint(run.checkpoints) if step is None else run.checkpoints / f"checkpoint-{step}"
    if found is None or not found.is_dir():
        kept = ", ".join(sorted(path.name for path in run.checkpoints.glob("checkpoint-*"))) or "none"
        which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise ConfigError(f"{run.path} has no {which} (kept: {kept}); learner.save_total_limit says how many are kept")
    return found, read_state(found)


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def _put(source: Path, target: Path) -> None:
    """A file of its own: who saves into the folder may write in place. Where the disk can, both share their blocks."""
    source = source.resolve()
    target.unlink(missing_ok=True)
    try:
        with source.open("rb") as read, target.open("wb") as written:
            while os.copy_file_range(read.fileno(), written.fileno(), _AT_ONCE):
                pass
    except OSError:  # another disk, or one that does not know the call; a full one says so again
        shutil.copyfile(source, target)


def _merge(base_model: Path, adapter: Path, target: Path) -> None:
    argv = [sys.executable, "-m", "harness_trainer.learner.merge", str(base_model), str(adapter), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="backslashreplace", check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        raise SetupError(
            f"the adapter could not be merged into its base model ({reason}): free memory, or take the adapter alone"
        )


def _name_base(folder: Path, facts: CardFacts) -> None:
    """The base by its public name: where it lay on this machine means nothing to others."""
    config = folder / "adapter_config.json"
    settings = {**_json(config), "base_model_name_or_path": base_name(facts)}
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _restore_settings(folder: Path, base_model: Path) -> None:
    """Undo what only training needed: recomputing activations turns the key-value cache off."""
    ours, theirs = _json(folder / "config.json"), _json(base_model / "config.json")
    if ours.get("use_cache") is False and theirs.get("use_cache", True):
        (folder / "config.json").write_text(json.dumps({**ours, "use_cache": True}, indent=2) + "\n", encoding="utf-8")
    if not (folder / "generation_config.json").exists() and (base_model / "generation_config.json").is_file():
        shutil.copyfile(base_model / "generation_config.json", folder / "generation_config.json")


def _facts(run: RunDir, state: HarnessState, base_model: Path, adapter: str) -> CardFacts:
    import yaml

    store = RolloutStore(run.store)
    try:
        outcomes = {name: count for name, count in store.outcome_counts().items() if name != "running"}
        engine = store.state(ENGINE_VERSION)
    finally:
        store.close()
    lines = run.metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if run.metrics.exists() else []
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    cached = "models--" + str(config["model"]).replace("/", "--")  # the Hub's cache calls a download's folder so
    return CardFacts(
        run=run.path.name,
        step=state.step,
        policy_version=state.policy_version,
        config=config,
        on_hub=cached in base_model.parts,
        steps=[line for line in map(json.loads, lines) if line["step"] <= state.step],
        outcomes=outcomes,
        versions={**_versions(), **({"vllm": engine} if engine else {})},
        adapter=adapter,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # optional, and so not used
    return found


def _json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
