"""What all rollouts of a runner share. Owns data only; made by `__main__`, and by whoever else runs rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from capture_proxy.types import Capture, Session, SessionPolicy
from harness_trainer.rewards.custom import RewardFunction
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.harbor import HarborAgents
from harness_trainer.rollouts.journal import Journal
from sandboxes.base import Backend
from sandboxes.pool import Pool


class Sessions(Protocol):
    """The gateway's sessions, as `capture_proxy.admin_client.AdminClient` has them; raises what that does."""

    async def mint(self, session_id: str, policy: SessionPolicy, labels: dict[str, str]) -> Session: ...

    async def seal(self, session_id: str) -> Session: ...

    async def capture(self, session_id: str) -> Capture: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What all rollouts of a runner share."""

    boxes: Boxes
    backend: Backend
    pool: Pool
    caps: Caps
    admin: Sessions
    reward: RewardFunction | None = None  # None = the verifier's reward counts
    harbor: HarborAgents | None = None  # None = the harness is not Harbor's
    journal: Journal | None = None  # None = a rollout ends with this process

    @property
    def config(self) -> RolloutConfig:
        return self.boxes.spec.config
