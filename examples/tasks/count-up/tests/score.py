"""How far the count goes (0.6), and how little else there is (0.4)."""

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
    numbers = [int(text) for text in re.findall(r"[0-9]{1,9}", answer)]
    if not numbers:
        return 0.0
    right = 0
    while right < min(10, len(numbers)) and numbers[right] == right + 1:
        right += 1
    clean = sum(character.isdigit() or character.isspace() for character in answer) / len(answer)
    enough = closeness(len(numbers), 10)
    return 0.6 * right / 10 * enough + 0.4 * clean * enough


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
