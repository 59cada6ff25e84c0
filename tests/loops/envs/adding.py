"""A real OpenEnv server of adding machines, for the tests: how one is served, and what else it does, says its reset."""

from __future__ import annotations

import os
import time
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator


class AddAction(Action):
    """Add a number to the total."""

    number: int

    @field_validator("number")
    @classmethod
    def _even_luck(cls, value: int) -> int:
        if value == 7:
            raise ValueError("seven is not allowed")
        return value


class Total(Observation):
    total: int = 0
    padding: str | None = None


class Adder(Environment):
    """Done at `goal`; a step earns what `earn` says, by its number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total, self.steps = 0, 0
        self.columns: dict[str, Any] = {}

    def reset(self, seed: Any = None, episode_id: Any = None, **columns: Any) -> Total:
        if columns.get("broken"):
            raise ValueError("this row is broken")
        self.total, self.steps, self.columns = int(columns.get("start", 0)), 0, columns
        return Total(total=self.total, done=bool(columns.get("over")))

    def step(self, action: AddAction, timeout_s: float | None = None, **_: Any) -> Total:
        if action.number == 13:
            raise ValueError("no such number")
        if action.number == 99:
            os._exit(9)
        time.sleep(self.columns.get("sleep_s", 0))
        self.total += action.number
        earned = self.columns.get("earn", [])
        reward = earned[self.steps] if self.steps < len(earned) else None
        self.steps += 1
        done = self.total >= self.columns.get("goal", 10**9)
        return Total(total=self.total, reward=reward, done=done, padding="x" * self.columns.get("padding", 0) or None)

    @property
    def state(self) -> State:
        return State(episode_id="adding", step_count=self.steps)


app = create_fastapi_app(Adder, AddAction, Total, max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "4")))


class Single(Adder):
    """As most people leave it."""

    SUPPORTS_CONCURRENT_SESSIONS = False


def single() -> Any:
    return create_fastapi_app(Single, AddAction, Total)
