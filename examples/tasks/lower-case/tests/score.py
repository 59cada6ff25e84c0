"""Each capital letter costs; fewer than 20 letters in all cost too."""

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
    letters = sum(character.isalpha() for character in answer)
    capitals = sum(character.isupper() for character in answer)
    return min(1.0, letters / 20) / (1 + capitals)


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
