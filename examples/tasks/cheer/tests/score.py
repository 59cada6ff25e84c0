"""Sentences of at most six words (0.4), ending with an exclamation mark (0.6); fewer than 8 words cost."""

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
    sentences = re.findall(r"[^.!?\n]*\w[^.!?\n]*[.!?]*", answer)
    if not sentences:
        return 0.0
    short = sum(len(sentence.split()) <= 6 for sentence in sentences)
    cheers = sum(sentence.endswith("!") for sentence in sentences)
    return (0.4 * short + 0.6 * cheers) / len(sentences) * min(1.0, len(answer.split()) / 8)


reward = score(read_answer())
print(f"reward {reward:.4f}")
(ROOT / "logs" / "verifier" / "reward.txt").write_text(f"{reward:.4f}\n")
