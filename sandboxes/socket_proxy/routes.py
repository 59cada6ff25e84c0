"""Which calls of the engine's API pass, and what must be so for each.

Owns the list; everything that is not on it is refused. Pure: whether a named object is ours is asked by `door`, what a
body may hold is `bodies`'. The list is what `sandboxes.docker*` uses, checked by running their tests through the proxy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlencode

Kind = Literal["container", "network", "volume", "image", "exec"]
Body = Literal["none", "stream", "create", "exec", "exec_start", "network", "volume", "free"]

CLAIM, LAYER, CONTENT = "harness-trainer.claim", "harness-trainer.layer", "harness-trainer.built.content"
REPOSITORY = "harness-trainer/"
_NAME = r"([A-Za-z0-9][A-Za-z0-9_.:-]*)"
_IMAGE = r"([A-Za-z0-9][A-Za-z0-9_.:/@-]*)"
_VERSION = re.compile(r"^/v1\.\d+(?=/)")
# Query parameters of a build that choose no more than what the image is made of.
_BUILD = frozenset(
    [
        "t",
        "q",
        "nocache",
        "rm",
        "forcerm",
        "pull",
        "dockerfile",
        "labels",
        "buildargs",
        "shmsize",
        "target",
        "platform",
        "cachefrom",
        "memory",
        "memswap",
        "cpushares",
        "cpusetcpus",
    ]
)
# Of a call that starts a container, ends it, or waits for it.
_SIGNALS = frozenset({"t", "signal", "condition", "detachKeys"})


class Refused(Exception):
    """The call does not pass; the message says why, and is the engine's answer to whoever asked."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that may pass. Example: Call("/v1.41/containers/4f2a/start", (("container", "4f2a"),), "none")."""

    target: str  # what the engine is asked
    owned: tuple[tuple[Kind, str], ...] = ()  # these must be ours
    body: Body = "none"
    upgrade: bool = False  # it may become a stream in both directions


Query = dict[str, str]
Make = Callable[[str, tuple[str, ...], Query], Call]


def decide(method: str, target: str) -> Call:
    """Raises Refused. `target` as in the request line; what is passed on is built anew from what was understood."""
    path, _, query_text = target.partition("?")
    version = _VERSION.match(path)
    prefix, rest = (version[0], path[version.end() :]) if version else ("", path)
    if "%" in rest:
        rest = unquote(rest)
    if "//" in rest or "/../" in rest or rest.endswith("/..") or "\0" in rest:
        raise Refused("this path is not one of the engine's")
    query = _query(query_text)
    for methods, pattern, make in _ROUTES:
        if method in methods and (found := pattern.fullmatch(rest)):
            return make(prefix + rest, found.groups(), query)
    raise Refused(f"{method} {rest[:100]} is not a call that sandboxes need")


def is_ours(labels: Mapping[str, str] | None) -> bool:
    """Of a container, network or volume. A built image's labels do not count: who starts it inherits them."""
    labels = labels or {}
    return CLAIM in labels or (LAYER in labels and CONTENT not in labels)


def is_our_image(labels: Mapping[str, str] | None) -> bool:
    labels = labels or {}
    return CONTENT in labels or LAYER in labels or CLAIM in labels


def _query(text: str) -> Query:
    pairs = parse_qsl(text, keep_blank_values=True)
    names = [name.lower() for name, _ in pairs]
    if len(set(names)) != len(names):
        raise Refused("a parameter is given twice")
    return dict(pairs)


def _with(path: str, query: Query) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _plain(path: str, groups: tuple[str, ...], query: Query) -> Call:
    return Call(_with(path, query))


def _of(kind: Kind, body: Body = "none", *, upgrade: bool = False) -> Make:
    return lambda path, groups, query: Call(_with(path, query), ((kind, groups[0]),), body, upgrade)


def _signal(path: str, groups: tuple[str, ...], query: Query) -> Call:
    """To a container. It is started as it was made: an engine could also do it from a checkpoint on the host's disk."""
    if unknown := sorted(set(query) - _SIGNALS):
        raise Refused(f"this call may not set {', '.join(unknown)}")
    return Call(_with(path, query), (("container", groups[0]),))


def _list(path: str, groups: tuple[str, ...], query: Query) -> Call:
    """Only of what is ours."""
    filters = _object(query.get("filters", "{}"))
    labels = filters.get("label", [])
    names = list(labels) if isinstance(labels, dict | list) else []
    if not any(str(name).startswith("harness-trainer.") for name in names):
        filters["label"] = [*names, CLAIM]
    return Call(_with(path, {**query, "filters": json.dumps(filters)}))


def _build(path: str, groups: tuple[str, ...], query: Query) -> Call:
    given = {name: value for name, value in query.items() if value not in ("", "None")}
    if unknown := sorted(set(given) - _BUILD):
        raise Refused(f"a build may not set {', '.join(unknown)}")
    if not given.get("t", REPOSITORY).startswith(REPOSITORY):
        raise Refused(f"a build may only name images {REPOSITORY}...")
    if not any(label.startswith("harness-trainer.") for label in _object(given.get("labels", "{}"))):
        raise Refused("a build must carry our labels")
    return Call(_with(path, given), body="stream")


def _pull(path: str, groups: tuple[str, ...], query: Query) -> Call:
    if set(query) - {"fromImage", "tag", "platform"} or not query.get("fromImage"):
        raise Refused("an image may be pulled by its name only")
    return Call(_with(path, query))


def _create(path: str, groups: tuple[str, ...], query: Query) -> Call:
    if set(query) - {"name", "platform"}:
        raise Refused("a container may be given a name and a platform only")
    return Call(_with(path, query), body="create")


def _body(body: Body) -> Make:
    return lambda path, groups, query: Call(path, body=body)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused("a parameter that must be a JSON object is none")
    return value


_ROUTES: list[tuple[tuple[str, ...], re.Pattern[str], Make]] = [
    (methods, re.compile(pattern), make)
    for methods, pattern, make in (
        (("GET", "HEAD"), "/_ping", _plain),
        (("GET",), "/(?:version|info)", _plain),
        (("GET",), "/containers/json", _list),
        (("POST",), "/containers/create", _create),
        (("GET",), f"/containers/{_NAME}/(?:json|logs|top)", _of("container")),
        (("POST",), f"/containers/{_NAME}/(?:start|stop|restart|kill|wait)", _signal),
        (("GET", "HEAD"), f"/containers/{_NAME}/archive", _of("container")),
        (("PUT",), f"/containers/{_NAME}/archive", _of("container", "stream")),
        (("DELETE",), f"/containers/{_NAME}", _of("container")),
        (("POST",), f"/containers/{_NAME}/exec", _of("container", "exec")),
        (("POST",), f"/exec/{_NAME}/start", _of("exec", "exec_start", upgrade=True)),
        (("GET",), f"/exec/{_NAME}/json", _of("exec")),
        (("GET",), "/images/json", _plain),
        (("POST",), "/images/create", _pull),
        (("GET",), f"/images/{_IMAGE}/json", _plain),
        (("DELETE",), f"/images/{_IMAGE}", _of("image")),
        (("POST",), "/build", _build),
        (("GET",), "/networks", _list),
        (("POST",), "/networks/create", _body("network")),
        (("GET", "DELETE"), f"/networks/{_NAME}", _of("network")),
        (("POST",), f"/networks/{_NAME}/disconnect", _of("network", "free")),
        (("GET",), "/volumes", _list),
        (("POST",), "/volumes/create", _body("volume")),
        (("DELETE",), f"/volumes/{_NAME}", _of("volume")),
    )
]
