"""Full marks for 55 to 65 characters; the further away, the less."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("SANDBOX_ROOT") or "/")


def read_answer() -> str:
    """The workspace's answer.txt if there is one, else what the agent said last."""
    for path in (ROOT / "app" / "answer.txt", ROOT / "logs" / "agent" / "final_message.txt"):
        if path.is_file() and not path.is_symlink():
            return path.read_text(errors="replace")[:10_000].strip()
    return ""


def score(answer: str) -> float:
    length = len(answer)
    if length < 55:
        return length / 55
    return min(1.0, 65 / length)


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
