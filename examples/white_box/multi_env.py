# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer", "openenv==0.10.0", "textarena==0.7.4", "open_spiel==2.0.2", "uvicorn"]
# ///
"""Two environments in one run, by a class that routes: Wordle and Catch, chosen by the column `env` of a row.

    python examples/white_box/multi_env.py --local --model smollm2 --run-dir runs/multi

The model sees the tools of both; the wrong one answers with an error. Each reward function says nothing (None) of the
other game's episodes. The games themselves are `wordle.py` and `catch.py` in this folder. Where each game shall show
its own tools only, give a dict of classes (`ENVIRONMENTS`, by the column `environment`) in place of the router.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import catch
import wordle

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
ENVIRONMENTS = {"wordle": wordle.WordleEnv, "catch": catch.CatchEnv}


class MultiEnv:
    """What the model plays. Clients are made in `reset`, so that an episode opens no session but its own."""

    def __init__(self) -> None:
        self.active = ""
        self.game: Any = None
        self.client: Any = None  # named, so that its session ends with the episode

    def reset(self, **columns: Any) -> str | None:
        if self.client is not None:
            self.client.close()
        self.active = columns.get("env", "wordle")
        self.game = ENVIRONMENTS[self.active]()
        self.client = self.game.client
        return self.game.reset(**columns)

    @property
    def done(self) -> bool:
        return bool(self.game is not None and self.game.done)

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        return self._playing("wordle").guess(guess)

    def move(self, direction: str) -> str:
        """
        Move the paddle of Catch by one column.

        Args:
            direction: Where to, 'left' or 'right'

        Returns:
            The board after the move.
        """
        return self._playing("catch").move(direction)

    def stay(self) -> str:
        """
        Let the ball of Catch fall by one row.

        Returns:
            The board after it.
        """
        return self._playing("catch").stay()

    def _playing(self, name: str) -> Any:
        if self.active != name:
            raise ValueError(f"This is a game of {self.active}: use its tools.")
        return self.game


def wordle_reward(environments: list[MultiEnv], **kwargs: Any) -> list[float | None]:
    terms = (wordle.reward_win, wordle.reward_partial, wordle.reward_invalid)
    return [
        sum(term([env.game])[0] or 0.0 for term in terms) if env.active == "wordle" else None for env in environments
    ]


def catch_reward(environments: list[MultiEnv], **kwargs: Any) -> list[float | None]:
    return [catch.reward_caught([env.game])[0] if env.active == "catch" else None for env in environments]


def rows(count: int = 500) -> list[dict[str, Any]]:
    return [
        {**row, "env": name}
        for pair in zip(wordle.rows(count), catch.rows(count), strict=True)
        for name, row in zip(("wordle", "catch"), pair, strict=True)
    ]


def main() -> int:
    """Write the rows, and train on them with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="serve both environments here, not in their Spaces")
    parser.add_argument("--rows", type=Path, default=Path("multi_env-rows.jsonl"), help="where to write the rows")
    args, rest = parser.parse_known_args()
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    here = Path(__file__).resolve()
    with contextlib.ExitStack() as stack:
        environment = dict(os.environ)
        if args.local:
            environment["WORDLE_URL"] = stack.enter_context(wordle.local_server())
            environment["CATCH_URL"] = stack.enter_context(catch.local_server())
        command = [*TRAIN, "--env", f"class:{here}:MultiEnv", "--tasks", str(args.rows)]
        command += ["--env.rewards", f"{here}:wordle_reward,{here}:catch_reward", "--env.stop-when-done", "true", *rest]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
