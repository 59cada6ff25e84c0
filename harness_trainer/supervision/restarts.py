"""How often a part of a run may die before the run ends, and how long to wait before it is started again.

Owns the settings and the count, pure but for the clock. `parts` asks it; which deaths are worth a restart at all is
decided there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field


class RestartConfig(BaseModel):
    """Example: with the defaults a part that dies for the fourth time within an hour ends the run."""

    model_config = ConfigDict(extra="forbid")

    max_deaths: int = Field(
        3,
        ge=0,
        description="deaths of one part (engine, gateway, runner, learner) survived within the window; 0 = none",
    )
    window_s: float = Field(3600, gt=0, description="deaths longer ago than this are forgotten")
    backoff_s: float = Field(
        1.0, ge=0, description="wait before a part is started again after its second death; doubles with each more"
    )
    max_backoff_s: float = Field(60.0, ge=0, description="the longest such wait")


class Restarts:
    """The deaths of all parts. `clock` gives seconds."""

    def __init__(self, config: RestartConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._deaths: dict[str, list[float]] = defaultdict(list)

    def num_deaths(self, part: str) -> int:
        """Within the window."""
        since = self._clock() - self.config.window_s
        self._deaths[part] = [at for at in self._deaths[part] if at > since]
        return len(self._deaths[part])

    def died(self, part: str) -> float | None:
        """Note a death; seconds to wait before the part is started again, None = the run is over.

        The first death within the window costs no wait: agents that lost their connection try again for seconds only.
        """
        self._deaths[part].append(self._clock())
        number = self.num_deaths(part)
        if number > self.config.max_deaths:
            return None
        wait_s = 0.0 if number == 1 else self.config.backoff_s * 2 ** min(number - 2, 60)
        return min(wait_s, self.config.max_backoff_s)
