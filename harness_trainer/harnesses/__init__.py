"""Harness adapters by name or file. Owns finding and parsing them; `base` says what they are, `install` installs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.command import PREFIX, command_harness, pin_command
from harness_trainer.harnesses.entry import entered
from harness_trainer.harnesses.harbor_agent import PREFIX as HARBOR
from harness_trainer.harnesses.harbor_agent import harbor_harness
from harness_trainer.harnesses.trial import try_rendering

_HERE = Path(__file__).parent


def shipped() -> list[str]:
    """Names that `--harness` knows."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def one_per_agent() -> list[str]:
    """One name per agent: the shipped adapters that are no other form of one."""
    import yaml

    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in _HERE.glob("*.yaml")}
    return sorted(name for name, data in files.items() if "extends" not in data)


def load_harness(spec: str, folder: Path | None = None) -> Harness:
    """The adapter called `spec`, the one in the YAML file `spec`, any command (`cmd:python my_agent.py`), or an agent
    that Harbor drives (`harbor:terminus-2`).

    Relative paths in `spec` are below `folder`; None = the current one. Raises ConfigError when there is no such
    adapter or its file is not valid.
    """
    import yaml
    from pydantic import ValidationError

    if spec.startswith(PREFIX):
        return command_harness(spec, folder or Path())
    if spec.startswith(HARBOR):
        return harbor_harness(spec, like=_shipped_as(spec.removeprefix(HARBOR)))
    try:
        harness = Harness.model_validate(_read(spec, folder or Path()))
        ways = [harness] if harness.intercept is None else [harness, entered(harness, "intercept")]
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"harness {spec} is not valid: {reason[:300]}") from error
    for way in ways:
        try:
            try_rendering(way)
        except ConfigError as error:
            raise ConfigError(f"harness {spec} is not valid: {error}") from error
    return harness


def pinned(spec: str) -> str:
    """The same agent for a process that works in another folder: paths of files are absolute."""
    if spec.startswith(PREFIX):
        return pin_command(spec)
    return str(_file_of(spec, Path())) if _names_a_file(spec) else spec


def _shipped_as(agent: str) -> Harness | None:
    """Our own adapter of the same agent, which says how it takes the end of its session."""
    return load_harness(agent) if agent in shipped() else None


def _names_a_file(spec: str) -> bool:
    return not spec.startswith((PREFIX, HARBOR)) and (spec.endswith((".yaml", ".yml")) or "/" in spec)


def _file_of(spec: str, folder: Path) -> Path:
    return (folder / Path(spec).expanduser()).resolve() if _names_a_file(spec) else _HERE / f"{spec}.yaml"


def _read(spec: str, folder: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The adapter's data, laid over the adapter it `extends`, if any (mappings merge, everything else replaces).

    What a file extends is looked for in its own folder. `below` are the files that extend this one.
    """
    import yaml

    path = _file_of(spec, folder)
    if not os.path.isfile(path):
        known = ", ".join(shipped())
        where = f" (there is no {path})" if _names_a_file(spec) else ""
        raise ConfigError(
            f"unknown harness {spec!r}{where}: known are {known}; or give a YAML file (./my_agent.yaml), "
            'any command ("cmd:python my_agent.py") or one of Harbor\'s agents ("harbor:terminus-2")'
        )
    if path in below:
        raise ConfigError(f"harness file {path} extends itself, by way of {below[-1]}: take one `extends` out")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ConfigError(f"harness file {path} is not valid: it must be a mapping with a name, argv and output")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"harness file {path} is not valid: extends must be one adapter's name or file, not {base!r}")
    return _merge(_read(base, path.parent, (*below, path)), data)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
