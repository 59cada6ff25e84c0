"""Environment classes in the style of the OpenEnv guide, and their reward functions: code that TRL runs as it is.

The games are played in this process, by clients with the guide's calls. Loaded by path, as a person's file is.
"""

from __future__ import annotations

from typing import Any, Literal

WORDS = ["crane", "slate"]
OPEN: list[Client] = []  # clients with a session


class Client:
    """A game's client: `reset`, `step`, `close`."""

    def __init__(self, secret: str = "crane") -> None:
        self.secret = secret
        self.history = ""
        OPEN.append(self)

    def reset(self) -> str:
        self.history = "Guess the word.\n"
        return self.history

    def step(self, guess: str) -> str:
        marks = "".join("G" if a == b else "X" for a, b in zip(guess, self.secret, strict=False))
        self.history += f"Feedback:\n{guess.upper()}\n{marks}\n"
        return self.history

    def close(self) -> None:
        if self in OPEN:
            OPEN.remove(self)


class EchoToolEnv:
    """The guide's first: rewarded by the text's length."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) / 10
        return message


class WordleEnv:
    """The guide's second: the end of a game is an exception, and the reward has several terms."""

    def __init__(self):
        self.client = Client()

    def reset(self, **kwargs) -> str | None:
        self.client.close()
        self.client = Client(kwargs.get("secret", "crane"))
        self._seen = self.client.reset()
        self.done = self.won = False
        self.num_guesses = self.best_greens = 0
        return self._seen

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
        history = self.client.step(guess.strip("[]"))
        feedback, self._seen = history[len(self._seen) :], history
        self.num_guesses += 1
        greens = feedback.count("G") - guess.upper().count("G")
        self.best_greens = max(self.best_greens, greens)
        self.won = greens == 5
        self.done = self.won or self.num_guesses == 6
        return feedback

    def __exit__(self, *error: object) -> None:
        self.client.close()


class CatchEnv:
    """Owns its reward; its tools are async, and one is inherited."""

    def __init__(self):
        self.column = 0

    def reset(self, start: int = 0, **kwargs) -> str:
        self.column = start
        return f"The ball falls at 2, you are at {start}."

    async def move(self, direction: Literal["left", "right"], steps: int = 1) -> str:
        """
        Move the paddle.

        Args:
            direction: Where to
            steps: How far

        Returns:
            The new column.
        """
        self.column += steps if direction == "right" else -steps
        return f"column {self.column}"

    def get_reward(self) -> float:
        return 1.0 if self.column == 2 else 0.0


class MultiEnv:
    """The guide's router: a column `env` of the row says which game is played, and all tools are offered."""

    def __init__(self):
        self._wordle = None
        self._catch = None
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "wordle")
        self.reward = 0.0
        self.done = False
        if self.active == "wordle":
            if self._wordle is not None:
                self._wordle.close()
            self._wordle = Client()
            return self._wordle.reset()
        self._catch = 0
        return "The ball falls at 1."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word
        """
        if self.active != "wordle":
            raise ValueError("There is no word to guess.")
        feedback = self._wordle.step(guess)
        self.reward = 1.0 if "GGGGG" in feedback else 0.0
        return feedback

    def move(self, direction: str) -> str:
        """
        Move the paddle left or right.

        Args:
            direction: left or right
        """
        if self.active != "catch":
            raise ValueError("There is no paddle to move.")
        self._catch += 1 if direction == "right" else -1
        self.reward = float(self._catch == 1)
        self.done = True
        return f"column {self._catch}"

    def _close(self) -> None:
        raise AssertionError("private: neither a tool nor a hook")


ENVIRONMENTS = {"wordle": WordleEnv, "catch": CatchEnv}


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def reward_win(environments, **kwargs) -> list[float]:
    return [1.0 + 0.5 * (1 - env.num_guesses / 6) if env.won else 0.0 for env in environments]


def reward_partial(environments, **kwargs) -> list[float]:
    return [0.0 if env.won else 0.1 * env.best_greens for env in environments]


def wordle_reward(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.active == "wordle" else None for env in environments]


async def catch_reward(environments, **kwargs) -> list[float | None]:
    return [(max(env.reward, 0.0) if env.done else 0.0) if env.active == "catch" else None for env in environments]


def says_nothing(completions: list[Any], **kwargs) -> list[None]:
    return [None] * len(completions)


SEEN: list[dict[str, Any]] = []  # what `keep` was shown, an episode each


def keep(prompts: list[Any], completions: list[Any], **kwargs) -> list[None]:
    SEEN.extend({"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True))
    return [None] * len(prompts)
