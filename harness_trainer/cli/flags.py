"""Turns a pydantic config into command-line flags and back.

Owns the mapping only: every scalar field becomes a flag (`rollouts.group_size` is `--rollouts.group-size`), a YAML file
gives the same fields, and a flag wins over the file, which wins over the preset. A part that comes in several kinds is
chosen by its own flag (`--sandbox docker`); below it are the fields of all kinds, each saying whose it is.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from harness_trainer.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

# Second names of flags.
_SHORT = {"rollouts.executor": "--executor", "rollouts.ray.address": "--ray-address"}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One value. Example: _Leaf("rollouts.group_size", "rollouts compared with each other", default=4)."""

    path: str
    about: str
    default: Any
    defaults: str = ""  # where kinds differ: each kind's own, as text

    @property
    def flag(self) -> str:
        return _flag(self.path)


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, model: type[BaseModel], preset: Mapping[str, Any]
) -> None:
    """Add one flag per field. Values stay text here; the config's own types check them."""
    for leaf in _leaves(model):
        default = _get(preset, leaf.path, leaf.default)
        empty = default is None or default is PydanticUndefined or isinstance(default, BaseModel)
        shown = leaf.defaults or ("" if empty else _text(default))
        help_text = f"{leaf.about} (default: {shown})" if shown else leaf.about
        name = leaf.path.split(".")[-1].upper()
        short = [_SHORT[leaf.path]] if leaf.path in _SHORT else []
        parser.add_argument(
            leaf.flag,
            *short,
            dest=leaf.path,
            default=None,
            metavar=name,
            help=help_text.strip().replace("%", "%%") or None,
        )


def resolve(
    model: type[Model], arguments: argparse.Namespace, preset: Mapping[str, Any], config_file: Path | None
) -> Model:
    """The config that is in force: preset, then file, then flags. Raises ConfigError naming field, value and reason."""
    data = _merge(copy.deepcopy(dict(preset)), _read_yaml(config_file) if config_file else {})
    for leaf in _leaves(model):
        given = getattr(arguments, leaf.path, None)
        if given is not None:
            _set(data, leaf.path, _parse(given))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_said(model, error.errors()[0])) from error


def _said(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """One line for a person: field, value, reason, flag."""
    location = [str(part) for part in error["loc"]]
    kind = ""
    if len(location) > 1 and location[0] in model.model_fields:
        kinds = _kinds(model.model_fields[location[0]])
        if location[1] in kinds:
            kind = location.pop(1)
            if error["type"] == "extra_forbidden":
                where, having = ".".join(location), [k for k, m in kinds.items() if location[1] in m.model_fields]
                said = f"{where}: {location[0]} {kind} has no such setting"
                return f"{said}; choose --{location[0]} {' or '.join(having)}" if having else said
    where = ".".join(_without_kinds(model, location))
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        # Settings that do not go together: their own words say which to change, and no single flag would.
        return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
    return f"{where}: {error['msg']}, got {error['input']!r}; set it with {_flag(where)} or in the YAML"


def _without_kinds(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Field names alone: pydantic puts the kind of a part between a part and its field."""
    names: list[str] = []
    parts, inside = list(location), model
    while parts:
        name = parts.pop(0)
        names.append(name)
        field = inside.model_fields.get(name)
        if field is None:
            return [*names, *parts]
        kinds = _kinds(field)
        if parts and parts[0] in kinds:
            inside = kinds[parts.pop(0)]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inside = field.annotation
        else:
            return [*names, *parts]
    return names


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[_Leaf]:
    """Every value. The `type` of a part is the part's own flag: `--sandbox local`."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        kinds = _kinds(field)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _leaves(inner, f"{prefix}{name}.")
        elif kinds:
            yield from _leaves_of_kinds(field, kinds, f"{prefix}{name}.")
        else:
            yield _Leaf(f"{prefix}{name}", field.description or "", field.get_default(call_default_factory=True))


def _kinds(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The kinds of a part by the value of their `type`; empty = the field is no such part."""
    members = get_args(field.annotation)
    if field.discriminator != "type" or not members:
        return {}
    return {get_args(member.model_fields["type"].annotation)[0]: member for member in members}


def _leaves_of_kinds(field: FieldInfo, kinds: Mapping[str, type[BaseModel]], prefix: str) -> Iterator[_Leaf]:
    chosen = field.get_default(call_default_factory=True)
    yield _Leaf(f"{prefix}type", f"{field.description or ''}: {', '.join(kinds)}", getattr(chosen, "type", None))
    found: dict[str, list[tuple[str, _Leaf]]] = {}
    for kind, model in kinds.items():
        for leaf in _leaves(model, prefix):
            if leaf.path != f"{prefix}type":
                found.setdefault(leaf.path, []).append((kind, leaf))
    for path, owners in found.items():
        about = "; ".join(dict.fromkeys(leaf.about for _, leaf in owners if leaf.about))
        texts = {kind: _text(leaf.default) for kind, leaf in owners if leaf.default is not None}
        # A value per kind is worth saying only where they differ.
        differ = ", ".join(f"{kind}: {text}" for kind, text in texts.items()) if len(set(texts.values())) > 1 else ""
        yield _Leaf(path, f"[{', '.join(kind for kind, _ in owners)}] {about}", owners[0][1].default, differ)


def _flag(path: str) -> str:
    return "--" + path.removesuffix(".type").replace("_", "-")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} must be a mapping of settings, such as `model: smollm2`")
    return data


def _parse(text: str) -> Any:
    """Objects, lists and null are JSON; everything else stays text, which the config's types convert."""
    if text == "null" or text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{text!r} is not valid JSON: {error}") from error
    return text


def _text(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):  # many fields, most of them not set
        value = {name: item for name, item in asdict(value).items() if item is not None}
    return value if isinstance(value, str) else json.dumps(value, default=to_jsonable_python)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in above.items():
        old = below.get(key)
        below[key] = _merge(dict(old), value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return below


def _get(data: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        if isinstance(data.get(part), str):  # `sandbox: local` in a file is short for its type
            data[part] = {"type": data[part]}
        data = data.setdefault(part, {})
    data[last] = value
