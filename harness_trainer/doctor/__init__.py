"""Preflight: what would end a run in its first minutes, found in seconds, each with the command that mends it.

Owns which checks there are. Each is a plain function that asks little, changes nothing and never raises for what it
finds: `machine` (this computer), `parts` (engine, gateway, ports), `fitting` (the model), `containers` (the Docker
engine), `secrets`. Called by `harness-trainer doctor` and, before a run, by the trainer's container.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness_trainer.config import RunConfig
from harness_trainer.doctor import containers, fitting, machine, parts, secrets
from harness_trainer.doctor.base import Check

__all__ = ["Check", "check_machine", "check_run"]


def check_machine() -> list[Check]:
    """What this machine has for the demo and for everything else; no run is meant."""
    return [
        machine.platform(),
        machine.python(),
        parts.engine(None),
        machine.gpu(wanted=False),
        machine.node(),
        machine.memory(),
        machine.disk_for_demo(),
        machine.shared_memory(None),
        *containers.engine(wanted=False),
        machine.leftovers(),
    ]


def check_run(config: RunConfig, run_dir: Path, environ: Mapping[str, str]) -> list[Check]:
    """The same for one run: what it needs is required, what it does not is left out."""
    in_docker = config.sandbox.type == "docker"
    model = fitting.local_folder(config)
    found = [
        machine.platform(),
        parts.engine(config),
        *parts.gateway(),
        *parts.ports(config),
        machine.disk(run_dir, model),
        machine.shared_memory(model),
        fitting.fits(config, model),
        *secrets.check(config, environ),
    ]
    if environ.get(machine.PROFILE, "cpu") != "cpu":
        found.append(machine.gpu(wanted=True))
    if in_docker:
        found += containers.engine(wanted=True, config=config)
    return found
