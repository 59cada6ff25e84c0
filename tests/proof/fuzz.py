"""Broken requests, made from valid ones by a seeded hand, and an ASGI client that sends them without a socket.

Owns the mutations: of the JSON tree, of the bytes, and of the HTTP around them. `test_fuzz` says what must hold.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlsplit

import zstandard

from tests.proof.fuzz_bodies import BODIES


def _nest(levels: int, inner: Any) -> Any:
    for level in range(levels):
        inner = {"a": inner} if level % 2 else [inner]
    return inner


NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53, -(2**63), 2**64, 10**40, 1e308, -0.0, 0.5),
    *("", " ", "x", "0", "null", "\x00", "🙂", "\ud800", "\udfff\ud800", "a" * 20_000, "assistant", "tool", "wizard"),
    *(
        "</s>",
        "<tool_call>",
        "auto",
        "required",
        "none",
        "any",
        "text",
        "function",
        "resp_x-0001",
        "data:image/png;base64,!!",
    ),
    *([], [[]], [None], ["x"], [{}], [1, 2], {}, {"a": 1}, {"type": "text"}, {"type": "x"}, {"": None}, {"type": None}),
    *({"type": "function"}, {"$ref": "#"}, _nest(40, 1), _nest(300, {}), [0] * 3000),
    *(float("nan"), float("inf"), float("-inf")),
]
ROLES = ["system", "developer", "user", "assistant", "tool", "model", "function", "", None, 7]
ENCODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("zstd", zstandard.compress),
    ("gzip, gzip", lambda b: gzip.compress(gzip.compress(b))),
    ("gzip", lambda b: b),
    ("gzip", lambda b: gzip.compress(b)[:-9]),
    ("zstd", lambda b: zstandard.compress(b)[:-3]),
    ("deflate", lambda b: b"\x78\x9c" + b),
    ("br", lambda b: b),
    ("identity", lambda b: b),
    ("", lambda b: b),
    ("gzip;q=1", gzip.compress),
    ("\xe9", lambda b: b),
]
HEADERS = [
    ("content-type", "text/plain"),
    ("content-type", "multipart/form-data; boundary=x"),
    ("content-type", "application/json; charset=utf-16"),
    ("content-type", ""),
    ("content-length", "-1"),
    ("content-length", "zzz"),
    ("accept", "text/html"),
    ("accept-encoding", "zstd"),
    ("expect", "100-continue"),
    ("transfer-encoding", "chunked"),
    ("x-stainless-retry-count", "many"),
    ("x-stainless-retry-count", "3"),
    ("anthropic-version", "\xff"),
    ("anthropic-beta", "a," * 500),
    ("x-goog-api-client", "x"),
    ("x-big", "x" * 60_000),
    ("cookie", "a=b"),
    ("", "nameless"),
]
CREDENTIALS = ["authorization", "x-api-key", "x-goog-api-key"]
TOKENS = ["", " ", "Bearer", "Bearer ", "bearer x", "Basic eDp5", "\xff\xfe", "sk-" + "x" * 10_000, "Bearer a b c"]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "FOO", "post"]


@dataclass
class Case:
    """One request. `note` tells a person which mutations made it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    method: str = "POST"
    note: list[str] = field(default_factory=list)
    num_chunks: int = 1
    hangs_up: bool = False  # the client goes away before the body is complete

    @property
    def same_route(self) -> bool:
        """Whether the request still reaches the dialect's own route, so that its shape is owed."""
        return self.method == "POST" and "path" not in self.note


def cases(dialect: str, paths: list[str], headers: dict[str, str], seed: int) -> Iterator[Case]:
    """An endless, repeatable row of requests, nearly all of them wrong."""
    rng = random.Random(f"{dialect} {seed}")
    while True:
        path = rng.choices(paths, [6 if i < 2 else 1 for i in range(len(paths))])[0]
        tree = copy.deepcopy(rng.choice(BODIES[dialect]))
        note: list[str] = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 6])):
            tree = _mutate_tree(rng, tree, note)
        body = _write(tree)
        if rng.random() < 0.2:
            body = _mutate_bytes(rng, body, note)
        case = Case(path, [*headers.items()], body, note=note)
        if rng.random() < 0.2:
            case = _mutate_http(rng, case)
        yield case


def _write(tree: Any) -> bytes:
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 5000


def _paths(tree: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if here:
        yield here
    if len(here) < 12:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree[:50]) if isinstance(tree, list) else ()
        for key, value in items:
            yield from _paths(value, (*here, key))


def _mutate_tree(rng: random.Random, tree: Any, note: list[str]) -> Any:
    paths = list(_paths(tree))
    if not paths:
        return _nasty(rng)
    path = rng.choice(paths)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], rng.randrange(10)
    note.append(f"{kind}@{'.'.join(map(str, path))}")
    if kind <= 3:
        parent[key] = _nasty(rng)
    elif kind == 4:
        del parent[key]
    elif kind == 5:
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
    elif kind == 6:
        if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice([parent[key], _nasty(rng)])))
        else:
            parent[rng.choice(["extra", "type", "role", "", "content", "id", "\ud83d"])] = _nasty(rng)
    elif kind == 7:
        _swap(rng, tree, paths)
    elif kind == 8:
        roles = [p for p in paths if p[-1] in ("role", "type")]
        if roles:
            return _replace(tree, rng.choice(roles), rng.choice([*ROLES, "reasoning", "tool_result", "item_reference"]))
    elif isinstance(parent, list):
        rng.shuffle(parent)
    else:
        parent[key] = _resize(rng, parent[key])
    return tree


def _nasty(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(NASTY))


def _resize(rng: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        return [copy.deepcopy(item) for _ in range(rng.choice([0, 2, 40])) for item in value]
    if isinstance(value, str):
        return value * rng.choice([0, 2, 3000]) if len(value) < 50 else value[: len(value) // 2]
    return -value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _swap(rng: random.Random, tree: Any, paths: list[tuple[Any, ...]]) -> None:
    one, other = rng.choice(paths), rng.choice(paths)
    if one[: len(other)] != other and other[: len(one)] != one:
        value, another = _at(tree, one), _at(tree, other)
        _replace(tree, one, copy.deepcopy(another))
        _replace(tree, other, copy.deepcopy(value))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replace(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    _at(tree, path[:-1])[path[-1]] = value
    return tree


def _mutate_bytes(rng: random.Random, body: bytes, note: list[str]) -> bytes:
    at = rng.randrange(len(body) + 1)
    kind = rng.randrange(11)
    note.append(f"bytes {kind} at {at}")
    text = body.decode()
    return [
        lambda: body[:at],
        lambda: body[:at] + bytes([rng.randrange(256)]) + body[at:],
        lambda: body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
        lambda: body + body,
        lambda: b"\xef\xbb\xbf" + body,
        lambda: text.encode("utf-16"),
        lambda: body.replace(b"{", b'{"messages": 1, "contents": 2, "input": [], "model": [],', 1),  # keys twice
        lambda: body[:-1] + b',"stream": "yes", "stream": true}' if body.endswith(b"}") else body,
        lambda: body.replace(b": ", b": \\u", 1),
        lambda: b"",
        lambda: body.replace(b'"', b"'"),
    ][kind]()


def _mutate_http(rng: random.Random, case: Case) -> Case:
    kind = rng.randrange(8)
    headers = list(case.headers)
    if kind == 0:
        name, encode = rng.choice(ENCODINGS)
        return replace(
            case, headers=[*headers, ("content-encoding", name)], body=encode(case.body), note=[*case.note, name]
        )
    if kind == 1:
        return replace(case, headers=[*headers, rng.choice(HEADERS)], note=[*case.note, "header"])
    if kind == 2:
        headers = [(k, v) for k, v in headers if k not in CREDENTIALS]
        if rng.random() < 0.7:
            headers.append((rng.choice(CREDENTIALS), rng.choice(TOKENS)))
        return replace(case, headers=headers, note=[*case.note, "credentials"])
    if kind == 3:
        return replace(
            case, headers=[*headers, (rng.choice(CREDENTIALS), rng.choice(TOKENS))], note=[*case.note, "two tokens"]
        )
    if kind == 4:
        return replace(case, method=rng.choice(METHODS), note=[*case.note, "method"])
    if kind == 5:
        return replace(case, path=_odd_path(rng, case.path), note=[*case.note, "path"])
    if kind == 6:
        return replace(case, num_chunks=rng.choice([2, 7, 50]), note=[*case.note, "chunks"])
    return replace(case, num_chunks=2, hangs_up=True, note=[*case.note, "hangs up"])


def _odd_path(rng: random.Random, path: str) -> str:
    parts = urlsplit(path)
    return rng.choice(
        [
            f"{parts.path}?alt=xml",
            f"{parts.path}?alt=sse&alt=json&key=",
            f"{parts.path}?%ff=%zz&&&=",
            parts.path + "/",
            "/" + parts.path,
            parts.path.upper(),
            parts.path.replace("/v1", "/v2"),
            parts.path.replace("m:", "a/b:c:"),
            parts.path.replace("m:", quote("é🙂 \x00", safe="") + ":"),
            parts.path.replace("m:", ":"),
            parts.path + quote(" \r\n\x00"),
            parts.path + "/" + "x" * 5000,
            "/v1/models/" + "a/" * 50,
            "/v1beta/models/m:unknownMethod",
            "/..%2f..%2fetc",
            "*",
        ]
    )


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def call(app: Any, case: Case) -> Answer | None:
    """The app's answer without a socket; None = the client hung up first and there was none."""
    parts = urlsplit(case.path)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": _unquote(parts.path),
        "raw_path": parts.path.encode("latin-1", "replace"),
        "query_string": parts.query.encode("latin-1", "replace"),
        "root_path": "",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in case.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    size = -(-len(case.body) // case.num_chunks) or 1
    chunks = [case.body[i : i + size] for i in range(0, len(case.body), size)] or [b""]
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False
    if case.hangs_up:
        messages[-1] = {"type": "http.disconnect"}
    answered = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    await app(scope, receive, send)
    if not sent:
        return None
    assert answered.is_set(), "an answer without an end"
    head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Answer(sent[0]["status"], head, b"".join(m.get("body", b"") for m in sent[1:]))


def _unquote(path: str) -> str:
    from urllib.parse import unquote_to_bytes

    return unquote_to_bytes(path).decode("utf-8", "replace")
