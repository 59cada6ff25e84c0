"""What the process in a job is to do, as the launcher writes it and that process reads it. Holds no secret."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class JobOrder(BaseModel):
    """Example: JobOrder(config={...}, run="math", runs="me/runs", timeout_s=21600, margin_s=600)."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any]  # of the run, resolved
    run: str  # its name: the folder of the run, there and in the copies
    runs: str  # where copies go: a Hub repository, or /FOLDER of a mounted volume
    timeout_s: float
    margin_s: float  # before the timeout: the run is ended and its last copy made
    final: str | None = None  # Hub repository of the trained model; None = it stays with the run's copy
    secrets: list[str] = Field(default_factory=list)  # names of variables whose values are never shown
    proxied_port: int | None = None  # that the service's own proxy leads to; None = the config says all of it
    namespace: str | None = None  # of the job
    setup: list[str] = Field(default_factory=list)  # environments to make first
