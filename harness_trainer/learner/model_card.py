"""The README of a trained model: what it was made from, how, and what came of it. Text only; `final_model` writes it.

A card is meant to be published, so nothing of the machine is in it: paths are cut to their last part, addresses lose
what comes before the host and after the path.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_MAX_ROWS = 20  # of the table of rewards
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card is made of. Example: CardFacts("demo", 40, 41, config, steps, {"ok": 310}, {"torch": "2.13.0"})."""

    run: str  # the run's name
    step: int  # optimizer steps taken
    policy_version: int  # the version under which the engine knew these weights
    config: Mapping[str, Any]  # the run's resolved config
    steps: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl up to `step`
    outcomes: Mapping[str, int]  # finished rollouts of the run by outcome
    versions: Mapping[str, str]  # libraries
    adapter: str = (
        ""  # "" = a whole model, `merged` = with the adapter in its weights, `alone` = an adapter without its base
    )


def model_card(facts: CardFacts) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads."""
    return (
        "\n".join([*_front_matter(facts), *_heading(facts), *_training(facts), *_rewards(facts), *_details(facts)])
        + "\n"
    )


def _front_matter(facts: CardFacts) -> list[str]:
    model = str(facts.config.get("model", ""))
    # Only a name on the Hub may stand there; a folder on some machine would be a broken link.
    base = [f"base_model: {model}"] if _HUB_ID.fullmatch(model) else []
    library = "peft" if facts.adapter == "alone" else "transformers"
    tags = ["harness-trainer", "reinforcement-learning", "grpo", "agent"]
    return [
        "---",
        *base,
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]


def _heading(facts: CardFacts) -> list[str]:
    model = public(str(facts.config.get("model", "?")))
    kind = {"": "", "merged": " The LoRA adapter is merged into the weights.", "alone": " This is a LoRA adapter."}
    return [
        "",
        f"# {model}, trained by harness-trainer",
        "",
        f"`{model}` after {facts.step} optimizer steps of reinforcement learning inside a coding agent: the agent "
        "works on a task in a sandbox, the task's verifier scores the result, and exactly the tokens that the engine "
        f"sampled are trained.{kind[facts.adapter]} Its licence is that of the base model.",
    ]


def _training(facts: CardFacts) -> list[str]:
    config = facts.config
    learner: Mapping[str, Any] = config.get("learner") or {}
    rollouts: Mapping[str, Any] = config.get("rollouts") or {}
    objective: Mapping[str, Any] = learner.get("objective") or {}
    env: Mapping[str, Any] = config.get("env") or {}
    rows = [
        ("Base model", public(str(config.get("model", "?")))),
        ("Tasks", public(str(config.get("tasks", "?"))) if env.get("type", "own") == "own" else _short(env)),
        (
            "Agent (harness)",
            public(str(config.get("harness", "?"))) if env.get("type", "own") == "own" else _short(env),
        ),
        ("Sandbox", str((config.get("sandbox") or {}).get("type", "?"))),
        ("Objective", _short(objective)),
        ("Optimizer", f"{learner.get('optimizer', '?')}, learning rate {learner.get('learning_rate', '?')}"),
        (
            "Steps",
            f"{facts.step}, each on {learner.get('groups_per_step', '?')} groups of {rollouts.get('group_size', '?')}",
        ),
        ("Policy version", f"v{facts.policy_version}"),
        ("Precision", str(learner.get("dtype", "?"))),
        ("Rollouts of the run", _short(facts.outcomes) or "not known"),
        ("Trained tokens", _total(facts.steps, "trained_tokens")),
    ]
    return ["", "## Training", "", "| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]


def _rewards(facts: CardFacts) -> list[str]:
    known = [line for line in facts.steps if line.get("reward_mean") is not None]
    head = ["", "## Rewards", ""]
    if not known:
        return [*head, "No step of this run had a scored rollout on record."]
    # Steps differ in their tasks, so single ones say little: each row is the mean over a stretch of the run.
    size = -(-len(known) // _MAX_ROWS)
    stretches = [known[start : start + size] for start in range(0, len(known), size)]
    lines = []
    for stretch in stretches:
        first, last = stretch[0]["step"], stretch[-1]["step"]
        mean = statistics.fmean(line["reward_mean"] for line in stretch)
        spreads = [line["reward_std"] for line in stretch if line.get("reward_std") is not None]
        spread = f"{statistics.fmean(spreads):.3f}" if spreads else "not known"
        lines.append(f"| {first if first == last else f'{first} to {last}'} | {mean:.3f} | {spread} |")
    return [*head, "| steps | mean reward | standard deviation |", "|---|---|---|", *lines]


def _details(facts: CardFacts) -> list[str]:
    import yaml

    config = yaml.safe_dump(_public_values(dict(facts.config)), sort_keys=False).rstrip()
    return [
        "",
        "## Versions",
        "",
        *(f"- {name} {version}" for name, version in facts.versions.items()),
        "",
        "## Configuration",
        "",
        f"Of the run `{public(facts.run)}`, as it was in force.",
        "",
        "```yaml",
        config,
        "```",
    ]


def public(text: str) -> str:
    """The text without what belongs to one machine. Example: public("/home/me/tasks") == "tasks"."""
    if "://" in text:
        parts = urlsplit(text)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return text.rstrip("/").rpartition("/")[2] or text if text.startswith(("/", "~", ".")) else text


def _public_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public_values(item) for item in value]
    return public(value) if isinstance(value, str) else value


def _short(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {public(str(value))}" for name, value in values.items() if value not in (None, ""))


def _total(steps: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [line[name] for line in steps if line.get(name) is not None]
    return f"{sum(values):,}" if values else "not known"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
