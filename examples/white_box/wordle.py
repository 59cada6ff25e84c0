# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer", "openenv==0.10.0", "textarena==0.7.4", "uvicorn"]
# ///
r"""Wordle: guess a word of five letters in six tries; a win counts, a lost game by its best guess, and nonsense costs.

A game of many turns, with the three reward terms of OpenEnv's guide.

    python examples/white_box/wordle.py --local --model smollm2 --run-dir runs/wordle \
        --rollouts.loop.max-completion-tokens 4096

Without --local it is played in the Space whose address is below; copy it, with MAX_CONCURRENT_ENVS set. The Space draws
its secrets from NLTK's list `words`, which is downloaded from GitHub. Where that fails (no internet) the local server
draws from SECRETS below, and takes as a word what the dictionary has that comes with TextArena: a win rate here and one
there are not the same measure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
WORDLE_URL = "https://openenv-wordle.hf.space"
PROMPT = """You are an expert Wordle solver with deep knowledge of English vocabulary.
Guess the secret word of five letters in at most six tries. After each guess you are told of each letter: G, it is in
the right place; Y, it is in the word, elsewhere; X, it is not in the word. Use the tool `guess` to make a guess."""
FEEDBACK = re.compile(r"Feedback:\n([A-Z ]+)\n([GYX ]+)")


class WordleEnv:
    """What the model plays."""

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient

        self.client = GenericEnvClient(base_url=os.environ.get("WORDLE_URL", WORDLE_URL))

    def reset(self, **columns: Any) -> str | None:
        chosen = {"seed": columns["seed"]} if columns.get("seed") is not None else {}  # the same word for a whole group
        result = self.client.reset(**chosen)
        self._heard = text_of(result)
        self.done = False
        self.won = False
        self.num_guesses = 0
        self.best_greens = 0
        self.invalid_moves = 0
        return self._heard

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step({"message": guess})
        text = text_of(result)
        feedback = text[len(self._heard) :]  # the environment repeats the whole game
        self._heard = text
        if "invalid move" in feedback.lower():
            self.invalid_moves += 1
        else:
            self.num_guesses += 1
            if match := FEEDBACK.search(feedback):
                self.best_greens = max(self.best_greens, match.group(2).count("G"))
            self.won = bool(result.done and (result.reward or 0.0) >= 1.0)
        self.done = result.done
        return feedback


def text_of(result: Any) -> str:
    return str(result.observation["messages"][0]["content"])


def reward_win(environments: list[WordleEnv], **kwargs: Any) -> list[float | None]:
    return [1.0 + 0.5 * (1 - env.num_guesses / 6) if env.won else 0.0 for env in environments]


def reward_partial(environments: list[WordleEnv], **kwargs: Any) -> list[float | None]:
    return [0.0 if env.won else 0.1 * env.best_greens for env in environments]


def reward_invalid(environments: list[WordleEnv], **kwargs: Any) -> list[float | None]:
    return [-0.1 * env.invalid_moves for env in environments]


def rows(count: int = 600) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "seed": seed} for seed in range(count)]


# -- the server --------------------------------------------------------------------------------------------------------

SECRETS = """
actor apple badge beach berry blade blood board bread brick bride brush cable camel candy chain chair chalk chest child
clock cloth cloud coach coast cream crown dance depth dream dress drink earth eagle field flame floor flour fruit ghost
glass globe glove grain grape grass guide heart honey horse hotel house juice knife layer lemon light limit match metal
money month mouth music night noise north nurse ocean onion paint paper party peace phone piano pilot place plane plant
plate point pound power price pride prize queen radio river robot scale sheep sheet shelf shirt skill smile smoke
snake space spoon sport staff stage steam stone store storm story sugar table taste teeth thief thing tiger title tower
track trade train truck trust uncle voice waste watch water wheel woman world youth
"""


def app() -> Any:
    return text_arena_app(make_wordle, "Wordle")


def make_wordle(seed: int | None) -> Any:
    """A game with a secret of its own; TextArena draws from a generator that all games of a process share."""
    game_class, secrets = wordle_of_this_machine()
    game = game_class()
    game.reset(num_players=1)
    game.state.game_state["secret_word"] = random.Random(seed).choice(secrets)
    return game


@cache
def wordle_of_this_machine() -> tuple[Any, list[str]]:
    """TextArena's game and its secrets; without NLTK's words, the same game on the words that come with TextArena."""
    import textarena
    from textarena.envs.utils.word_lists import EnglishDictionary
    from textarena.envs.Wordle.env import WordleEnv as Wordle

    try:
        made = Wordle()
    except LookupError:
        dictionary = EnglishDictionary(keep_proper_nouns=False, include_nltk=False)
        secrets = SECRETS.split()
    else:
        dictionary, secrets = made.dictionary, sorted(made.word_list)

    class Prepared(Wordle):  # type: ignore[misc, valid-type]
        """Reading the dictionary takes seconds: once, not once a game."""

        def __init__(self) -> None:
            textarena.Env.__init__(self)
            self.word_length, self.num_guesses = 5, 6
            self.word_list, self.dictionary = secrets, dictionary

    return Prepared, secrets


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
    parser.add_argument("--rows", type=Path, default=Path("wordle-rows.jsonl"), help="where to write the rows")
    args, rest = parser.parse_known_args()
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    here = Path(__file__).resolve()
    with local_server() if args.local else contextlib.nullcontext(WORDLE_URL) as url:
        command = [*TRAIN, "--env", f"class:{here}:WordleEnv", "--tasks", str(args.rows)]
        rewards = ",".join(
            f"{here}:{reward.__name__}"
            for reward in (
                reward_win,
                reward_partial,
                reward_invalid,
            )
        )
        command += ["--env.rewards", rewards, "--env.stop-when-done", "true", *rest]
        return subprocess.run(command, env={**os.environ, "WORDLE_URL": url}, check=False).returncode


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
