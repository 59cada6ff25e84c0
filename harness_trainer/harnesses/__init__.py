"""Harness adapters by name or file. Owns finding and parsing them; `base` says what they are, `install` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.command import PREFIX, command_harness
from harness_trainer.harnesses.harbor_agent import PREFIX as HARBOR
from harness_trainer.harnesses.harbor_agent import harbor_harness

_HERE = Path(__file__).parent


def shipped() -> list[str]:
    """Names that `--harness` knows."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def one_per_agent() -> list[str]:
    """One name per agent: the shipped adapters that are no other form of one."""
    import yaml

    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in _HERE.glob("*.yaml")}
    return sorted(name for name, data in files.items() if "extends" not in data)


def load_harness(spec: str) -> Harness:
    """The adapter called `spec`, the one in the YAML file `spec`, any command (`cmd:python my_agent.py`), or an agent
    that Harbor drives (`harbor:terminus-2`).

    Raises ConfigError when there is no such adapter or its file is not valid.
    """
    import yaml
    from pydantic import ValidationError

    if spec.startswith(PREFIX):
        return command_harness(spec)
    if spec.startswith(HARBOR):
        return harbor_harness(spec, like=_shipped_as(spec.removeprefix(HARBOR)))
    try:
        return Harness.model_validate(_read(spec))
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"harness {spec} is not valid: {reason[:300]}") from error


def _shipped_as(agent: str) -> Harness | None:
    """Our own adapter of the same agent, which says how it takes the end of its session."""
    return load_harness(agent) if agent in shipped() else None


def _read(spec: str) -> dict[str, Any]:
    """The adapter's data, laid over the adapter it `extends`, if any (mappings merge, everything else replaces)."""
    import yaml

    looks_like_file = spec.endswith((".yaml", ".yml")) or "/" in spec
    path = Path(spec) if looks_like_file else _HERE / f"{spec}.yaml"
    if not path.is_file():
        known = ", ".join(shipped())
        raise ConfigError(
            f"unknown harness {spec!r}: known are {known}; or give a YAML file (./my_agent.yaml), "
            'any command ("cmd:python my_agent.py") or one of Harbor\'s agents ("harbor:terminus-2")'
        )
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ConfigError(f"harness file {path} is not valid: it must be a mapping with a name, argv and output")
    base = data.pop("extends", None)
    return data if base is None else _merge(_read(base), data)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
