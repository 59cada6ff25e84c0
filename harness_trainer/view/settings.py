"""A run's own config.yaml as the viewer needs it, and as a person may be shown it: without secrets.

Owns which of its fields the viewer reads and what counts as a secret. A config that cannot be read is none: a run is
looked at also where its settings are of another version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from harness_trainer.learner.objective_config import ObjectiveConfig
from jobs.masking import MASK, Mask

_SECRET_FIELD = re.compile(r"(?:^|_)(?:key|token|secret|password|passwd|authorization|credentials?)$", re.IGNORECASE)
_NOT_SECRET = frozenset({"reward_key"})  # the name of a reward
_SECRET_FLAG = re.compile(r"--?[\w-]*(?:key|token|secret|password)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_IN_TEXT = re.compile(r"\b(?:hf_|sk-|e2b_|ghp_|github_pat_|glpat-|xox[abp]-)[\w-]{12,}|(?i:bearer )[\w.~+/-]{12,}")
# A name and its value, as in an address or a command line. It begins where a word does: a long word would be read once
# for each of its letters, and a log's line of 200 kB took a quarter of an hour.
_PAIR = re.compile(
    r"(?i)(?<![\w-])([\w-]*(?:key|token|secret|password)=|--?[\w-]*(?:key|token|secret|password)[ \t]+)[^&\s]+"
)


@dataclass(frozen=True, slots=True)
class Config:
    """Example: Config({"model": "smollm2", ...}, sources=["code"], max_steps=20, objective=ObjectiveConfig())."""

    data: dict[str, Any] = field(default_factory=dict)  # as it is written, secrets included
    sources: list[str] = field(default_factory=list)  # names; [] = the run has one, which needs none
    max_steps: int | None = None  # None = nothing is learnt, or nobody knows
    objective: ObjectiveConfig | None = None  # None = not known: no advantage can be told


class Settings:
    """The config of one run, read anew when the file is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[object, Config] = (None, Config())

    def read(self) -> Config:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size)
            if seen != self._known[0]:
                data = yaml.safe_load(self._path.read_text(encoding="utf-8"))
                self._known = (seen, _config(data if isinstance(data, dict) else {}))
        except (OSError, ValueError, yaml.YAMLError):
            return Config()
        return self._known[1]


def _config(data: dict[str, Any]) -> Config:
    learner = data.get("learner")
    learner = learner if isinstance(learner, dict) else {}
    max_steps = learner.get("max_steps")
    sources = data.get("sources")
    names = [str(one.get("name")) for one in sources if isinstance(one, dict)] if isinstance(sources, list) else []
    objective: ObjectiveConfig | None = None
    if learner:
        try:
            objective = ObjectiveConfig.model_validate(learner.get("objective") or {})
        except ValidationError:
            objective = None
    return Config(data, names, max_steps if isinstance(max_steps, int) else None, objective)


def shown(data: Any) -> Any:
    """The settings with every secret masked: by the field's name, by its form, and this process's own by value."""
    return _masked(data, _own())


def without_secrets(text: str) -> str:
    """A text of the run's parts: whatever has the form of a key, or of a session's token, is masked."""
    return _masked_text(text, _own())


def _own() -> Mask:
    return Mask(value for name, value in os.environ.items() if _SECRET_FIELD.search(name))


def _masked(value: Any, own: Mask) -> Any:
    if isinstance(value, Mapping):
        return {key: _of_field(str(key), inner, own) for key, inner in value.items()}
    if isinstance(value, list):
        flags = [False, *(isinstance(one, str) and bool(_SECRET_FLAG.fullmatch(one)) for one in value)]
        return [MASK if after else _masked(one, own) for one, after in zip(value, flags, strict=False)]
    return _masked_text(value, own) if isinstance(value, str) else value


def _of_field(name: str, value: Any, own: Mask) -> Any:
    is_secret = bool(_SECRET_FIELD.search(name)) and name not in _NOT_SECRET and isinstance(value, str) and value
    return MASK if is_secret else _masked(value, own)


def _masked_text(text: str, own: Mask) -> str:
    text = _IN_TEXT.sub(MASK, _IN_ADDRESS.sub(MASK, own(text)))
    return _PAIR.sub(lambda match: match[1] + MASK, text)
