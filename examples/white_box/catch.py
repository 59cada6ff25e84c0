# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer", "openenv==0.10.0", "open_spiel==2.0.2", "uvicorn"]
# ///
"""Catch: a ball falls through ten rows of five columns; the paddle at the bottom must be under it.

    python examples/white_box/catch.py --local --model smollm2 --run-dir runs/catch

A game of OpenSpiel's behind OpenEnv's protocol. Without --local it is played in the Space whose address is below; copy
it, with MAX_CONCURRENT_ENVS set.
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
CATCH_URL = "https://openenv-openspiel-env.hf.space"
PROMPT = """Catch the ball (o) with the paddle (x): when the ball is in the bottom row, both must be in the same column.
Each call of `move` or `stay` lets the ball fall by one row.

"""  # what `reset` says is put right behind it
NUM_ROWS, NUM_COLUMNS = 10, 5
LEFT, STAY, RIGHT = 0, 1, 2


class CatchEnv:
    """What the model plays."""

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient

        self.client = GenericEnvClient(base_url=os.environ.get("CATCH_URL", CATCH_URL))

    def reset(self, **columns: Any) -> str | None:
        chosen = {"seed": columns["seed"]} if columns.get("seed") is not None else {}  # the same ball for a whole group
        result = self.client.reset(**chosen)
        self.reward = 0.0
        self.done = bool(result.done)
        return drawn(result.observation["info_state"])

    def move(self, direction: str) -> str:
        """
        Move the paddle by one column.

        Args:
            direction: Where to, 'left' or 'right'

        Returns:
            The board after the move.
        """
        if direction not in ("left", "right"):
            raise ValueError("direction must be 'left' or 'right'")
        return self._step(LEFT if direction == "left" else RIGHT)

    def stay(self) -> str:
        """
        Let the ball fall by one row.

        Returns:
            The board after it.
        """
        return self._step(STAY)

    def _step(self, action: int) -> str:
        if self.done:
            raise ValueError("The ball has landed.")
        result = self.client.step({"action_id": action, "game_name": "catch"})
        self.done = bool(result.done)
        self.reward = float(result.reward or 0.0)
        if self.done:
            return "Caught!" if self.reward > 0 else "Missed."
        return drawn(result.observation["info_state"])


def drawn(info_state: list[float]) -> str:
    """The board: the ball is above, the paddle in the last row."""
    below = len(info_state) - NUM_COLUMNS
    cells = ["." if not value else "o" if at < below else "x" for at, value in enumerate(info_state)]
    return "\n".join("".join(cells[at : at + NUM_COLUMNS]) for at in range(0, len(cells), NUM_COLUMNS))


def reward_caught(environments: list[CatchEnv], **kwargs: Any) -> list[float | None]:
    return [max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def rows(count: int = 200) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "seed": seed} for seed in range(count)]


# -- the server, as the Space runs it ----------------------------------------------------------------------------------


def app() -> Any:
    """An OpenEnv server of Catch, with the messages of OpenEnv's own OpenSpiel environment."""
    import pyspiel
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import Field

    class OpenSpielAction(Action):
        """Make a move."""

        action_id: int
        game_name: str = "catch"
        game_params: dict[str, Any] = Field(default_factory=dict)

    class OpenSpielObservation(Observation):
        info_state: list[float] = Field(default_factory=list)
        legal_actions: list[int] = Field(default_factory=list)
        game_phase: str = "playing"

    class Catch(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()
            self._game: Any = None

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> OpenSpielObservation:
            self._state = State(episode_id=episode_id)
            self._game = pyspiel.load_game("catch").new_initial_state()
            self._game.apply_action(random.Random(seed).randrange(NUM_COLUMNS))  # where the ball starts
            return self._seen()

        def step(self, action: OpenSpielAction, timeout_s: float | None = None, **_: Any) -> OpenSpielObservation:
            if self._game is None or self._game.is_terminal():
                raise ValueError("reset the game first")
            if action.action_id not in self._game.legal_actions():
                raise ValueError(f"action_id must be one of {self._game.legal_actions()}")
            self._state.step_count += 1
            self._game.apply_action(action.action_id)
            return self._seen()

        def _seen(self) -> OpenSpielObservation:
            done = self._game.is_terminal()
            return OpenSpielObservation(
                info_state=list(self._game.observation_tensor(0)),
                legal_actions=[] if done else list(self._game.legal_actions()),
                game_phase="terminal" if done else "playing",
                done=done,
                reward=float(self._game.returns()[0]) if done else 0.0,
            )

        @property
        def state(self) -> State:
            return self._state

    places = int(os.environ.get("MAX_CONCURRENT_ENVS", "64"))
    return create_fastapi_app(Catch, OpenSpielAction, OpenSpielObservation, max_concurrent_envs=places)


# -- running it --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Write the rows, and train on them with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="serve the environment here, not in the Space")
    parser.add_argument("--rows", type=Path, default=Path("catch-rows.jsonl"), help="where to write the rows")
    args, rest = parser.parse_known_args()
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    here = Path(__file__).resolve()
    with local_server() if args.local else contextlib.nullcontext(CATCH_URL) as url:
        command = [*TRAIN, "--env", f"class:{here}:CatchEnv", "--tasks", str(args.rows)]
        rewards = ",".join(f"{here}:{reward.__name__}" for reward in (reward_caught,))
        command += ["--env.rewards", rewards, "--env.stop-when-done", "true", *rest]
        return subprocess.run(command, env={**os.environ, "CATCH_URL": url}, check=False).returncode


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
