"""A quarter each: five lines, short lines, five different bullets, nothing but bullets."""

import os
import re
from pathlib import Path

ROOT = Path(os.environ.get("SANDBOX_ROOT") or "/")


def read_answer() -> str:
    """The workspace's answer.txt if there is one, else what the agent said last."""
    for path in (ROOT / "app" / "answer.txt", ROOT / "logs" / "agent" / "final_message.txt"):
        if path.is_file() and not path.is_symlink():
            return path.read_text(errors="replace")[:10_000].strip()
    return ""


def closeness(number: int, target: int) -> float:
    """1 at the target, falling towards 0 on both sides."""
    return min(number, target) / max(number, target)


def score(answer: str) -> float:
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if not lines:
        return 0.0
    short = sum(len(line.split()) <= 3 for line in lines) / len(lines)
    bullets = [line for line in lines if re.match(r"- \S", line)]
    distinct = len({line.lower() for line in bullets})
    return (closeness(len(lines), 5) + short + closeness(distinct, 5) + len(bullets) / len(lines)) / 4


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
