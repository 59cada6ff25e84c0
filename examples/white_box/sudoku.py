# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer", "openenv==0.10.0", "textarena==0.7.4", "uvicorn"]
# ///
r"""Sudoku with partial credit: a solved puzzle earns 1, any other the share of its empty cells that were filled.

    python examples/white_box/sudoku.py --local --model smollm2 --run-dir runs/sudoku \
        --rollouts.loop.max-completion-tokens 4096

A policy that never solves one still finds out which of its games went further. Without --local it is played in the
Space whose address is below; copy it, with MAX_CONCURRENT_ENVS and the game set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
SUDOKU_URL = "https://openenv-sudoku.hf.space"
PROMPT = """Solve the Sudoku. Fill one empty cell (shown as .) at a time with the tool `place`.
Rows and columns are numbered from 1 to 9.

"""  # what `reset` says is put right behind it
NUM_CLUES = 75  # of 81 cells; fewer are harder


class SudokuEnv:
    """What the model plays."""

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient

        self.client = GenericEnvClient(base_url=os.environ.get("SUDOKU_URL", SUDOKU_URL))

    def reset(self, **columns: Any) -> str | None:
        chosen = {"seed": columns["seed"]} if columns.get("seed") is not None else {}  # the same puzzle for a group
        self._heard = text_of(self.client.reset(**chosen))
        self.num_empty = self.left = empty_cells(self._heard) or 1
        self.done = False
        self.solved = False
        self.invalid_moves = 0
        return self._heard[self._heard.rfind("[GAME]") :]  # the board, without the rules in front of it

    def place(self, row: int, column: int, number: int) -> str:
        """
        Write a number into an empty cell.

        Args:
            row: The row, 1 to 9 from the top
            column: The column, 1 to 9 from the left
            number: The number, 1 to 9

        Returns:
            The board, or why the move is not valid.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step({"message": f"[{row} {column} {number}]"})
        text = text_of(result)
        said, self._heard = text[len(self._heard) :], text
        if "invalid move" in said.lower():
            self.invalid_moves += 1
        elif (left := empty_cells(said)) is not None:
            self.left = left
        self.done = result.done
        self.solved = bool(result.done and (result.reward or 0.0) >= 1.0)
        return said


def text_of(result: Any) -> str:
    return str(result.observation["messages"][0]["content"])


def empty_cells(text: str) -> int | None:
    """Of the last board in the text; None = there is none."""
    if (start := text.rfind("C1 C2 C3")) < 0:
        return None
    board = [line for line in text[start:].splitlines() if line.startswith("R") and line[1:2].isdigit()]
    return sum(line.count(".") for line in board[:9])


def reward_solved(environments: list[SudokuEnv], **kwargs: Any) -> list[float | None]:
    return [1.0 if env.solved else 0.0 for env in environments]


def reward_filled(environments: list[SudokuEnv], **kwargs: Any) -> list[float | None]:
    """Partial credit, of puzzles that were not solved."""
    return [0.0 if env.solved else (env.num_empty - env.left) / env.num_empty for env in environments]


def reward_invalid(environments: list[SudokuEnv], **kwargs: Any) -> list[float | None]:
    return [-0.05 * env.invalid_moves for env in environments]


def rows(count: int = 300) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "seed": seed} for seed in range(count)]


# -- the server --------------------------------------------------------------------------------------------------------

_drawing = threading.Lock()  # TextArena draws from the generator of the whole process


def app() -> Any:
    return text_arena_app(make_sudoku, "Sudoku")


def make_sudoku(seed: int | None) -> Any:
    from textarena.envs.Sudoku.env import SudokuEnv as Sudoku

    game = Sudoku(clues=NUM_CLUES, max_turns=100)
    with _drawing:
        random.seed(seed)
        game.reset(num_players=1)
    return game


def text_arena_app(make_game: Any, name: str) -> Any:
    """An OpenEnv server of one TextArena game, with the messages of OpenEnv's own TextArena environment."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import Field
    from textarena.wrappers import LLMObservationWrapper

    class TextArenaAction(Action):
        """Say something in the game."""

        message: str

    class TextArenaObservation(Observation):
        messages: list[dict[str, Any]] = Field(default_factory=list)

    class TextArena(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()
            self._game: Any = None

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> TextArenaObservation:
            self._state = State(episode_id=episode_id)
            self._game = LLMObservationWrapper(env=make_game(seed))
            return self._seen(done=False)

        def step(self, action: TextArenaAction, timeout_s: float | None = None, **_: Any) -> TextArenaObservation:
            self._state.step_count += 1
            done, _info = self._game.step(action.message)
            if not done:
                return self._seen(done=False, reward=0.0)
            ended, info = self._game.close()
            return self._seen(done=True, reward=ended[0], last=info[0].get("reason", ""))

        def _seen(self, *, done: bool, reward: float | None = None, last: str = "") -> TextArenaObservation:
            _, text = self._game.get_observation()
            message = {"sender_id": -1, "content": text + (f"\n[GAME] {last}" if last else ""), "category": "MESSAGE"}
            return TextArenaObservation(messages=[message], done=done, reward=reward)

        @property
        def state(self) -> State:
            return self._state

    TextArena.__name__ = name
    places = int(os.environ.get("MAX_CONCURRENT_ENVS", "64"))
    return create_fastapi_app(TextArena, TextArenaAction, TextArenaObservation, max_concurrent_envs=places)


# -- running it --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Write the rows, and train on them with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="serve the environment here, not in the Space")
    parser.add_argument("--rows", type=Path, default=Path("sudoku-rows.jsonl"), help="where to write the rows")
    args, rest = parser.parse_known_args()
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    here = Path(__file__).resolve()
    with local_server() if args.local else contextlib.nullcontext(SUDOKU_URL) as url:
        command = [*TRAIN, "--env", f"class:{here}:SudokuEnv", "--tasks", str(args.rows)]
        rewards = ",".join(
            f"{here}:{reward.__name__}"
            for reward in (
                reward_solved,
                reward_filled,
                reward_invalid,
            )
        )
        command += ["--env.rewards", rewards, "--env.stop-when-done", "true", *rest]
        return subprocess.run(command, env={**os.environ, "SUDOKU_URL": url}, check=False).returncode


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """The address of this file's own server, in a thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app(), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise SystemExit("the environment's server did not start; its error is above")
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    sys.exit(main())
