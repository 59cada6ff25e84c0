"""Braces at both ends (0.2), keys named (0.15) and in quotes (0.15), valid JSON (0.25), just these keys (0.25)."""

import json
import os
from pathlib import Path

ROOT = Path(os.environ.get("SANDBOX_ROOT") or "/")


def read_answer() -> str:
    """The workspace's answer.txt if there is one, else what the agent said last."""
    for path in (ROOT / "app" / "answer.txt", ROOT / "logs" / "agent" / "final_message.txt"):
        if path.is_file() and not path.is_symlink():
            return path.read_text(errors="replace")[:10_000].strip()
    return ""


KEYS = ("name", "age", "city")


def score(answer: str) -> float:
    points = 0.1 * answer.startswith("{") + 0.1 * answer.endswith("}")
    points += 0.05 * sum((key in answer) + (f'"{key}"' in answer) for key in KEYS)
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return points
    if not isinstance(value, dict):
        return points
    return points + 0.25 + 0.25 * (set(value) == set(KEYS))


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
