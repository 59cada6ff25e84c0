"""The agent of the chaos run: a few calls in one conversation, retried while the model side is away. Standard library.

Owns how an agent of this run behaves, and two ways of spoiling its own rollout that are the machinery's failures to
whoever runs it: it may end before it has asked anything, or remove the sandbox that it works in. Taken along into each
sandbox (`cmd:python3 chaos_agent.py ...`). What it prints last is its final message.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

GIVE_UP_S = 240.0  # of one call: an engine that was killed is back by then
# The gateway is given by its address; a proxy that the environment names is for everything else.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.4, help="seconds of work between two calls")
    parser.add_argument("--no-start", type=float, default=0.0, help="share of agents that end at once")
    parser.add_argument("--break-box", type=float, default=0.0, help="share of agents that remove their sandbox")
    options = parser.parse_args()
    # Its token is its own: agents differ, and the same agent would do the same again.
    chance = random.Random(os.environ["OPENAI_API_KEY"])
    fate, side_call = chance.random(), chance.random() < 0.3
    if fate < options.no_start:
        print("chaos: this agent cannot start", file=sys.stderr)
        return 1
    messages = [{"role": "user", "content": sys.stdin.read()}]
    if side_call:
        ask(messages, max_tokens=1)  # as some agents do to see whether the model is there
    said = ""
    for number in range(options.calls):
        said = ask(messages).get("content") or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"More, part {number + 2}."}]
        time.sleep(options.pause * (0.5 + chance.random()))
        root = os.environ["SANDBOX_ROOT"]  # empty in a sealed one, which cannot be removed from within
        if number == 0 and root and fate < options.no_start + options.break_box:
            shutil.rmtree(Path(root).parent, ignore_errors=True)
    print(said)
    return 0


def ask(messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """The assistant's message. Raises SystemExit when the session is closed, or nobody answers for long."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **options}).encode()
    deadline, attempt, problem = time.monotonic() + GIVE_UP_S, 0, ""
    while time.monotonic() < deadline:
        headers = {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(attempt),  # tells the gateway that this is not another call
        }
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        try:
            with _opener.open(urllib.request.Request(url, body, headers), timeout=GIVE_UP_S) as reply:
                message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code < 500 and error.code not in (408, 409, 429):
                raise SystemExit(f"chaos: {problem}") from error
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        attempt += 1
        time.sleep(min(2.0, 0.25 * 2**attempt))
    raise SystemExit(f"chaos: {problem}")


if __name__ == "__main__":
    sys.exit(main())
