"""The README of a trained model: what it was made from, how, and what came of it. Text only; `final_model` writes it.

A card is meant to be published, so nothing of the machine is in it: paths are cut to their last part, also inside a
command, and addresses lose what comes before the host and after the path.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_ROWS = 20  # of the table of rewards
# An address, or an absolute path: at the start of a word, or right behind a flag of one letter (-I/usr/include).
_ADDRESS_OR_PATH = re.compile(
    r"""(?P<scheme>[A-Za-z][\w+.-]*)://(?:[^\s/"']*@)?(?P<rest>[^\s?#"']*)(?:[?#][^\s"']*)?"""
    r"""|(?:(?<![\w./~-])|(?<=\s-\w))(?P<path>(?:~[\w.-]*|\.{1,2})?/[^\s:,;"']*)"""
)


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
    on_hub: bool = False  # config["model"] is a name on the Hub; False = a folder on some machine, or the demo model
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
    # Only a name on the Hub may stand there; a folder on some machine would be a broken link.
    base = [f"base_model: {base_name(facts)}"] if facts.on_hub else []
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
    model = base_name(facts)
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
        ("Base model", base_name(facts)),
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
        ("Precision", _precision(learner)),
        ("Rollouts of the run", _short(facts.outcomes) or "not known"),
        ("Trained tokens", _total(facts.steps, "trained_tokens")),
    ]
    return ["", "## Training", "", "| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]


def _precision(learner: Mapping[str, Any]) -> str:
    dtype = str(learner.get("dtype", "?"))
    if dtype != "bfloat16":
        return dtype
    return "bfloat16, the adapter in float32" if learner.get("lora") else "computed in bfloat16, trained in float32"


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


def base_name(facts: CardFacts) -> str:
    """The base model as others may know it: its name on the Hub, or that of its folder."""
    model = str(facts.config.get("model", "?"))
    return model if facts.on_hub else _last_part(model)


def public(text: str) -> str:
    """The text without what belongs to one machine. Example: public("cmd:/home/me/agent --x") == "cmd:agent --x"."""
    if "://" not in text and text.startswith(("/", "~", ".")):
        return _last_part(text)  # whatever is in it, blanks too
    return _ADDRESS_OR_PATH.sub(_public_part, text)


def _public_part(found: re.Match[str]) -> str:
    if found["path"] is not None:
        return _last_part(found["path"])
    scheme, rest = found["scheme"], found["rest"]
    return f"{scheme}:{_last_part(rest)}" if rest.startswith("/") else f"{scheme}://{rest}"  # file:///home/me/x


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


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
