"""What a vLLM server really does, found out by asking it.

Owns the requests that prove each capability and the flag that is missing where one is not proven. Nothing is believed
of a version number or a documented flag: what was not seen is False. Called when an engine has started, by the trainer
and by people (`harness-trainer doctor`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from capture_proxy.engines import wire
from capture_proxy.engines.base import Capabilities
from capture_proxy.errors import CaptureError, EngineError, EngineUnreachable

_MESSAGES = [{"role": "user", "content": "Count from one to ten."}]
_TEMPERATURE = 2.0  # far enough from 1 that the two modes differ by more than rounding
_TOLERANCE = 2e-3  # relative; log-probabilities of half-precision engines are this exact
MISSING = {
    "token_ids": "a vLLM that knows return_token_ids (0.10.2 or newer)",
    "logprobs": "log-probabilities: do not start vLLM with --max-logprobs 0",
    "processed_logprobs": "--logprobs-mode processed_logprobs",
    "token_in": "--enable-scale-out",
    "weight_versions": "--enable-scale-out on a vLLM that reports weight_versions (0.30 or newer)",
    "dev_routes": "environment variable VLLM_SERVER_DEV_MODE=1",
    "weight_update": "--weight-transfer-config '{\"backend\": ...}'",
}


@dataclass(slots=True)
class _Seen:
    token_ids: bool = False
    logprobs: bool = False
    processed_logprobs: bool = False
    token_in: bool = False
    weight_versions: bool = False
    dev_routes: bool = False
    weight_update: bool = False
    weight_fault: str = ""  # why it could not be asked for the update


async def probe(http: httpx.AsyncClient, *, model: str | None = None) -> Capabilities:
    """Ask the server behind `http` (its `base_url` is vLLM's root) what it can do, with a dozen small requests.

    `model` None = the only model served. Raises EngineUnreachable, and EngineError when the model cannot be told. A
    probe request that fails proves nothing, so its capability is False.
    """
    name, max_model_len = await _model(http, model)
    seen = _Seen()
    for test in (_chat, _processed, _tokens, _weights):
        await _attempt(test, http, name, seen)
    missing = {name: hint for name, hint in MISSING.items() if not getattr(seen, name)}
    if not seen.dev_routes:  # without these routes nothing is known of the transfer itself
        missing.pop("weight_update", None)
    elif seen.weight_fault:
        missing["weight_update"] += f" (or it is set: {seen.weight_fault})"
    return Capabilities(
        model=name,
        max_model_len=max_model_len,
        token_ids=seen.token_ids,
        logprobs=seen.logprobs,
        processed_logprobs=seen.processed_logprobs,
        token_in=seen.token_in,
        weight_versions=seen.weight_versions,
        weight_update=seen.dev_routes and seen.weight_update,
        missing=list(missing.values()),
    )


async def _model(http: httpx.AsyncClient, wanted: str | None) -> tuple[str, int | None]:
    models = (await _ask(http, "GET", "/v1/models")).get("data") or []
    names = [str(m.get("id")) for m in models]
    chosen = [m for m in models if wanted in (None, m.get("id"))]
    if len(chosen) != 1:
        raise EngineError(f"the engine serves {names}: name one of them")
    length = chosen[0].get("max_model_len")
    return str(chosen[0]["id"]), length if isinstance(length, int) else None


async def _ask(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request with a JSON object for an answer. Raises EngineUnreachable and what `wire.answer` raises."""
    try:
        response = await http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise EngineUnreachable(f"the engine does not answer: {str(error) or type(error).__name__}") from error
    return wire.answer(response.status_code, response.content, path)


_Test: TypeAlias = Callable[[httpx.AsyncClient, str, _Seen], Awaitable[None]]


async def _attempt(test: _Test, http: httpx.AsyncClient, model: str, seen: _Seen) -> None:
    """A failed test leaves its capabilities unproven."""
    try:
        await test(http, model, seen)
    except EngineUnreachable:
        raise
    except (CaptureError, KeyError, IndexError, TypeError, AttributeError, ValueError):
        return


async def _chat(http: httpx.AsyncClient, model: str, seen: _Seen) -> None:
    body = {"model": model, "messages": _MESSAGES, "max_tokens": 4, "logprobs": True, "return_token_ids": True}
    data = await _ask(http, "POST", "/v1/chat/completions", body)
    choice = data["choices"][0]
    ids = choice["token_ids"]
    seen.token_ids = bool(data["prompt_token_ids"]) and bool(ids) and all(type(i) is int for i in ids)
    values = [wire.logprob(entry["logprob"]) for entry in choice["logprobs"]["content"]]
    seen.logprobs = bool(values) and len(values) == len(ids) and None not in values


async def _processed(http: httpx.AsyncClient, model: str, seen: _Seen) -> None:
    """Two proofs that need no luck: the gap between two candidates shrinks by exactly the temperature, and a token
    that is the only one allowed has probability one. Raw log-probabilities know of neither."""
    body = {
        "model": model,
        "messages": _MESSAGES,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
    }
    plain, hot = [await _candidates(http, {**body, "temperature": t}) for t in (1.0, _TEMPERATURE)]
    shared = sorted(plain.keys() & hot.keys(), key=lambda token: plain[token])
    gap, hot_gap = (side[shared[-1]] - side[shared[0]] for side in (plain, hot))
    scaled = gap > 1e-3 and math.isclose(hot_gap * _TEMPERATURE, gap, rel_tol=_TOLERANCE, abs_tol=1e-3)
    first = await _ask(http, "POST", "/v1/chat/completions", {**body, "temperature": 1.0})
    token = first["choices"][0]["token_ids"][0]
    alone = await _ask(http, "POST", "/v1/chat/completions", {**body, "allowed_token_ids": [token], "top_logprobs": 0})
    entry = alone["choices"][0]["logprobs"]["content"][0]
    seen.processed_logprobs = scaled and abs(float(entry["logprob"])) < 1e-4


async def _candidates(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, float]:
    """The most likely first tokens and their finite log-probabilities."""
    data = await _ask(http, "POST", "/v1/chat/completions", body)
    entries = data["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    values = {str(entry["token"]): wire.logprob(entry["logprob"]) for entry in entries}
    return {token: value for token, value in values.items() if value is not None}


async def _tokens(http: httpx.AsyncClient, model: str, seen: _Seen) -> None:
    rendered = await _ask(http, "POST", "/v1/chat/completions/render", {"model": model, "messages": _MESSAGES})
    params = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0}
    body = {"model": model, "token_ids": rendered["token_ids"], "sampling_params": params}
    data = await _ask(http, "POST", "/inference/v1/generate", body)
    choice = data["choices"][0]
    ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    seen.token_in = bool(ids) and [entry["token_id"] for entry in entries] == ids
    spans = wire.version_spans(choice.get("weight_versions"))
    seen.weight_versions = bool(spans) and spans[0].start == 0 and spans[-1].end == len(ids)


async def _weights(http: httpx.AsyncClient, model: str, seen: _Seen) -> None:
    """The routes answer, and the server's own configuration names a transfer. Nothing is changed."""
    info = await _ask(http, "GET", "/weight_info")
    seen.dev_routes = "weight_version" in info
    try:
        config = await _ask(http, "GET", "/server_info?config_format=json")
    except EngineUnreachable:
        raise
    except EngineError as error:
        seen.weight_fault = f"/server_info failed, {error}"
        return
    seen.weight_update = bool(config["vllm_config"].get("weight_transfer_config"))
