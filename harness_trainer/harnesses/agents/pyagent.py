"""A small coding agent: the instruction on stdin, two tools, the last message on stdout.

Runs inside a sandbox as a program of its own, on whatever python3 is there: it needs only the standard library. It
knows the model only through OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Exit code 0 = it finished, 1 = the model
could not be reached, 3 = it ran out of turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 600.0  # of one model call
RETRIES = 2  # of a call that failed in a way that may pass
OUT_OF_TURNS = 3  # exit code
SYSTEM = "You are a helpful assistant. Answer the request."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a text file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
                "required": ["path", "content"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
]


def write_file(path: str, content: str) -> str:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content, encoding="utf-8")
    return f"wrote {len(content)} characters to {path}"


def bash(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, errors="backslashreplace", timeout=30, check=False
    )
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"[:4000]


def call_tool(name: str, arguments: str) -> str:
    """The tool's answer; a bad call is an answer too, so that the model can learn from it."""
    tools: dict[str, Callable[..., str]] = {"write_file": write_file, "bash": bash}
    tool = tools.get(name)
    if tool is None:
        return f"error: there is no tool {name!r}"
    try:
        parsed = json.loads(arguments)
        return tool(**parsed)
    except (ValueError, TypeError, OSError, subprocess.SubprocessError) as error:
        return f"error: {error}"


class Stopped(Exception):
    """The gateway wants no more calls of this session: the work is over."""


class Unreachable(Exception):
    """The model did not answer, also not when asked again."""


def complete(messages: list[Any], **options: Any) -> dict[str, Any]:
    """The assistant's message. Raises Stopped or Unreachable."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **options}).encode()
    problem = ""
    for attempt in range(RETRIES + 1):
        headers = {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(attempt),  # tells the gateway that this is not another call
        }
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        try:
            with _opener.open(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S) as reply:
                message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code == 403:
                raise Stopped(problem) from error
            if error.code not in (408, 409, 429) and error.code < 500:
                break
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt < RETRIES:
            time.sleep(0.5 * 2**attempt)
    raise Unreachable(problem)


# The gateway is given by its address; a proxy that the environment names is for everything else.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-turns", type=int, default=8)
    parser.add_argument("--no-tools", action="store_true")
    options = parser.parse_args()
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": sys.stdin.read()},
    ]
    extra: dict[str, Any] = {} if options.no_tools else {"tools": TOOLS}
    answer, exit_code = "", 0
    for _ in range(options.max_turns):
        try:
            message = complete(messages, **extra)
        except Stopped as stopped:
            print(f"stopped by the gateway: {stopped}", file=sys.stderr)
            break
        except Unreachable as error:
            print(f"the model could not be reached: {error}", file=sys.stderr)
            return 1
        answer = message.get("content") or answer
        calls = message.get("tool_calls") or []
        if not calls:
            break
        messages.append({key: value for key, value in message.items() if value is not None})
        for call in calls:
            result = call_tool(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    else:  # nothing ended it
        exit_code = 0 if options.no_tools else OUT_OF_TURNS
    print(answer)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
