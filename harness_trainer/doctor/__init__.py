"""Preflight: what would end a run in its first minutes, found in seconds, each with the command that mends it.

Owns which checks there are. Each is a plain function that asks little, changes nothing and never raises for what it
finds: `machine` (this computer), `parts` (engine, gateway, ports), `fitting` (the model), `containers` (the Docker
engine), `secrets`, `sources` (tasks, agents, environments). Called by `harness-trainer doctor` and, before a run, by
the trainer's container and by the process in a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness_trainer.config import RunConfig
from harness_trainer.doctor import containers, fitting, machine, parts, secrets, sources
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


def check_run(
    config: RunConfig, run_dir: Path, environ: Mapping[str, str], *, engine_url: str | None = None
) -> list[Check]:
    """The same for one run: what it needs is required, what it does not is left out.

    `engine_url`: of an engine that serves already, which takes the place of one of ours.
    """
    if engine_url is not None:
        found = [machine.platform(), *parts.gateway(), machine.disk(run_dir, None), sources.listens(engine_url)]
        return found + _of_rollouts(config, environ)
    model = fitting.local_folder(config)
    found = [
        machine.platform(),
        parts.engine(config),
        *parts.gateway(),
        *parts.ports(config),
        machine.disk(run_dir, fitting.kept(config, model, run_dir)),
        machine.shared_memory(fitting.sent(config, model)),
        fitting.fits(config, model),
    ]
    if environ.get(machine.PROFILE, "cpu") != "cpu":
        found.append(machine.gpu(wanted=True))
    return found + _of_rollouts(config, environ)


def _of_rollouts(config: RunConfig, environ: Mapping[str, str]) -> list[Check]:
    found = [*secrets.check(config, environ), *sources.check(config, environ)]
    return found + (containers.engine(wanted=True, config=config) if sources.needs_docker(config) else [])
