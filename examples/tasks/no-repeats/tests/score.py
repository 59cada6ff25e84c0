"""The share of different words, squared; fewer than 15 words cost."""

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


def score(answer: str) -> float:
    words = re.findall(r"[a-z']+", answer.lower())
    if not words:
        return 0.0
    return min(1.0, len(words) / 15) * (len(set(words)) / len(words)) ** 2


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
