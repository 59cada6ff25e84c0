"""Settings of `rollouts.executor: ray`. Owns the configuration only; `members` and `executor` obey it."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

_AUTO = "auto"
_ADDRESS = re.compile(r"auto|[^\s:/\[\]]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


class RayConfig(BaseModel):
    """Which cluster, and what of it a run takes."""

    model_config = ConfigDict(extra="forbid")

    address: str = Field(
        _AUTO, description="HOST:PORT of the cluster's head; auto = $RAY_ADDRESS, else the one that this host is in"
    )
    per_node: int | None = Field(
        None,
        ge=1,
        description="rollouts at once on a node that was started without the resource `rollouts`; null = no limit of "
        "its own, rollouts.max_concurrent is spread over all",
    )
    patience_s: float = Field(
        600, gt=0, description="how long the run waits for another node once none is left that takes rollouts"
    )

    @field_validator("address")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                f"{value} is Ray Client's address: run this on a host of the cluster (ray start "
                "--address=HEAD:6379 joins one) and give auto, or the head's HOST:PORT"
            )
        if not _ADDRESS.fullmatch(value):
            raise ValueError(f"{value!r} is neither auto nor HOST:PORT, e.g. 10.0.0.1:6379")
        return value

    def refusal(self, executor: str) -> str | None:
        """Why these settings do not go with the executor, and what to do; None = they do.

        Whoever names a cluster means it to be used. The other settings only tune, and may stand in a shared file.
        """
        if executor == "ray" or self.address == _AUTO:
            return None
        return (
            f"ray.address names the Ray cluster at {self.address}, and executor {executor} uses none: add "
            "--executor ray (rollouts.executor) to run agents there, or leave the address out, which over a file is "
            "--ray-address auto"
        )
