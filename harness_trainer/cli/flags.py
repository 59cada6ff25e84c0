"""Turns a pydantic config into command-line flags and back.

Owns the mapping only: every scalar field becomes a flag (`rollouts.group_size` is `--rollouts.group-size`), a YAML file
gives the same fields, and a flag wins over the file, which wins over the preset. A part that comes in several kinds is
chosen by its own flag (`--sandbox docker`); below it are the fields of all kinds, each saying whose it is. Of a part
whose kind a flag changes, the file's settings stay as far as the new kind has them.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from harness_trainer.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

# Second names of flags.
_SHORT = {"rollouts.executor": "--executor", "rollouts.ray.address": "--ray-address"}

_UNCLEAR = re.compile(r"""[][{}"']""")  # in a list of texts: their commas may be no separators


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One value. Example: _Leaf("rollouts.group_size", "rollouts compared with each other", default=4)."""

    path: str
    about: str
    default: Any
    defaults: str = ""  # where kinds differ: each kind's own, as text
    is_words: bool = False  # a list of plain texts: as a flag also `a,b`

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
            metavar=f"{name},..." if leaf.is_words else name,
            help=help_text.strip().replace("%", "%%") or None,
        )


def note(text: str) -> None:
    """Something that a person should know of the settings, and that stops nothing."""
    print(f"harness-trainer: note: {text}", file=sys.stderr)


def resolve(
    model: type[Model],
    arguments: argparse.Namespace,
    preset: Mapping[str, Any],
    config_file: Path | None,
    *,
    trim: Callable[[dict[str, Any]], None] = lambda file: None,
    say: Callable[[str], None] = note,
) -> Model:
    """The config that is in force: preset, then file, then flags. Raises ConfigError naming field, value and reason.

    `trim` takes out of the file what this command has no use for; `say` gets what a flag made void of the file.
    """
    data = merged(model, arguments, preset, config_file, trim=trim, say=say)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_said(model, error.errors()[0])) from error


def merged(
    model: type[BaseModel],
    arguments: argparse.Namespace,
    preset: Mapping[str, Any],
    config_file: Path | None,
    *,
    trim: Callable[[dict[str, Any]], None] = lambda file: None,
    say: Callable[[str], None] = note,
) -> dict[str, Any]:
    """What `resolve` validates: only what somebody set. Raises ConfigError for what cannot be read."""
    file = _read_yaml(config_file) if config_file else {}
    trim(file)
    flags = [(leaf, given) for leaf in _leaves(model) if (given := getattr(arguments, leaf.path, None)) is not None]
    for leaf, given in flags:
        if leaf.path.endswith(".type"):
            left_out = _change_kind(model, file, leaf.path.removesuffix(".type"), given)
            if left_out:
                say(f"{leaf.flag} {given} has no {', '.join(left_out)}: passed over in {config_file}")
    data = _merge(copy.deepcopy(dict(preset)), file)
    for leaf, given in flags:
        _set(data, leaf.path, _parse(leaf, given))
    return data


def _said(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """One line for a person: field, value, reason, flag."""
    names, part = _without_kinds(model, [str(part) for part in error["loc"]])
    where = ".".join(names)
    if error["type"] == "extra_forbidden":
        if part is None or len(names) != part.depth + 1:
            return f"{where}: there is no such setting; --help lists those that there are"
        at, having = ".".join(names[:-1]), [kind for kind, m in part.kinds.items() if names[-1] in m.model_fields]
        said = f"{where}: {at} {part.kind} has no such setting"
        return f"{said}; choose {_flag(at)} {' or '.join(having)}" if having else said
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        # Settings that do not go together: their own words say which to change, and no single flag would.
        return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
    flag = _flag_of(model, names)
    return (
        f"{where}: {error['msg']}, got {_short(error['input'])}; set it {f'with {flag} or ' if flag else ''}in the YAML"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The innermost part of several kinds on the way to a field. Example: of `sandbox.root`, depth 1, kind "local"."""

    depth: int
    kind: str
    kinds: Mapping[str, type[BaseModel]]


def _without_kinds(model: type[BaseModel], location: Sequence[str]) -> tuple[list[str], _Part | None]:
    """Field names alone: pydantic puts the kind of a part between a part and its field."""
    names: list[str] = []
    part: _Part | None = None
    parts, inside = list(location), model
    while parts:
        name = parts.pop(0)
        names.append(name)
        field = inside.model_fields.get(name)
        if field is None:
            break
        kinds = _kinds(field)
        if parts and parts[0] in kinds:
            part = _Part(len(names), parts[0], kinds)
            inside = kinds[parts.pop(0)]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inside = field.annotation
        else:
            break
    return [*names, *parts], part


def _flag_of(model: type[BaseModel], names: Sequence[str]) -> str | None:
    """The flag that sets a field or, of an element of a list or a mapping, the whole of it; None = there is none."""
    paths = {leaf.path.removesuffix(".type") for leaf in _leaves(model)}
    found = (path for end in range(len(names), 0, -1) if (path := ".".join(names[:end])) in paths)
    return next(map(_flag, found), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


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
            default = field.get_default(call_default_factory=True)
            yield _Leaf(f"{prefix}{name}", field.description or "", default, is_words=_is_words(inner))


def _is_words(annotation: Any) -> bool:
    of = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return list[str] in of


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
        first = owners[0][1]
        whose = ", ".join(kind for kind, _ in owners)
        yield _Leaf(path, f"[{whose}] {about}", first.default, differ, is_words=first.is_words)


def _change_kind(model: type[BaseModel], file: dict[str, Any], path: str, chosen: str) -> list[str]:
    """Before a flag chooses another kind than the file: of the file's part stays what that kind has and somebody set.

    A file that `--dry-run` wrote names every field of its kind, each with that kind's own default. Returns what else is
    left out, by its path.
    """
    *parents, name = path.split(".")
    for parent in parents:
        inner, file = model.model_fields[parent].annotation, file.get(parent, {})
        if not isinstance(inner, type) or not isinstance(file, dict):
            return []
        model = inner
    part, kinds, kind = file.get(name), _kinds(model.model_fields[name]), chosen.partition(":")[0]
    # A part without a type is meant for whichever kind is chosen.
    old = kinds.get(str(part.get("type")).partition(":")[0]) if isinstance(part, dict) else None
    if part is None or old is None or kind not in kinds or old is kinds[kind]:
        return []
    usual = old.model_construct().model_dump(mode="json")
    given = _without(part, {key: value for key, value in usual.items() if key != "type"})
    file[name] = {key: value for key, value in given.items() if key in kinds[kind].model_fields and key != "type"}
    return [f"{path}.{key}" for key in given if key not in file[name] and key != "type"]


def _without(part: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What of a part is not as usual."""
    left: dict[str, Any] = {}
    for key, value in part.items():
        default = usual.get(key, PydanticUndefined)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if other := _without(value, default):
                left[key] = other
        elif value != default:
            left[key] = value
    return left


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


def _parse(leaf: _Leaf, text: str) -> Any:
    """Objects, lists and null are JSON, a list of texts is also `a,b`; else text, which the config's types convert."""
    if text == "null" or text.startswith("[" if leaf.is_words else ("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{text!r} is not valid JSON: {error}") from error
    return _words(leaf, text) if leaf.is_words else text


def _words(leaf: _Leaf, text: str) -> list[str]:
    """Raises ConfigError where a comma may be part of a text, and where there is no text."""
    words = [word for part in text.split(",") if (word := part.strip())]
    if not words:
        raise ConfigError(f"""{leaf.flag} is empty: give texts with commas between them, or a JSON list ('["..."]')""")
    if _UNCLEAR.search(text):
        raise ConfigError(
            f"{leaf.flag} {_short(text)}: what holds brackets, braces or quotes must be in a JSON list, "
            """written as '["...", "..."]'"""
        )
    return words


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
        if not isinstance(data, dict):
            raise ConfigError(f"{part} must be a mapping of settings in the YAML, not {_short(data)}")
    data[last] = value
