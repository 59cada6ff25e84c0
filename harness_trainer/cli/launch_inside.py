"""`harness-trainer launch inside`: in a job, what `in_job` does with the order that the launcher put in a variable."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.job_order import JobOrder

if TYPE_CHECKING:
    from jobs.copies import Copies

TRAIN = (sys.executable, "-m", "harness_trainer.cli", "train")
CHECK = (sys.executable, "-m", "harness_trainer.cli", "doctor", "--before-run", "train")  # before it, with the same
_ADDRESS_S = 120.0  # for the service to say where the job's port is reached


def run(argv: Sequence[str], *, train: Sequence[str] = TRAIN, check: Sequence[str] = CHECK) -> int:
    began = time.time()
    parser = argparse.ArgumentParser(prog="harness-trainer launch inside")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the run, on a disk of this machine")
    options = parser.parse_args(argv)
    from harness_trainer.in_job import JobRun, prepare
    from harness_trainer.rundir import RunDir
    from jobs.errors import JobsError
    from jobs.masking import Mask

    order = read_order(os.environ)
    mask = Mask(os.environ.get(name, "") for name in order.secrets)
    try:
        prepare(order)
        order = order.model_copy(update={"config": with_address(order, os.environ)})
        spent_s = max(time.time() - began, age_of_job(order, os.environ))
        return JobRun(
            order,
            copies_of(order),
            RunDir(options.runs / order.run),
            train=train,
            check=check,
            mask=mask,
            publish=None if order.final is None else lambda folder: _publish(order, folder),
            spent_s=spent_s,
        ).go()
    except JobsError as error:
        raise SetupError(mask(str(error))) from error


def read_order(environ: Mapping[str, str]) -> JobOrder:
    """Raises ConfigError."""
    from jobs.hf import ORDER

    text = environ.get(ORDER)
    if text is None:
        raise ConfigError(f"{ORDER} is not set: this command is for a job that `harness-trainer launch hf-jobs` makes")
    try:
        return JobOrder.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{ORDER} is of another version ({where}: {first['msg']}): launch from the version that is in the job"
        ) from error


def copies_of(order: JobOrder) -> Copies:
    from jobs.copies import FolderCopy, HubCopy
    from jobs.hf import client

    if order.runs.startswith("/"):
        return FolderCopy(Path(order.runs) / order.run)
    return HubCopy(client(), order.runs, order.run)


def with_address(order: JobOrder, environ: Mapping[str, str], *, within_s: float = _ADDRESS_S) -> dict[str, Any]:
    """The run's config, with the address at which the service's own proxy leads to this job. Raises JobsError."""
    if order.proxied_port is None:
        return order.config
    from jobs.errors import JobsError
    from jobs.hf import client, inspect, namespace_of

    job_id = environ.get("JOB_ID")
    if not job_id:
        raise JobsError("JOB_ID is not set here, so the job's own address is unknown: launch with another --expose")
    api = client()
    namespace = namespace_of(api, order.namespace)
    deadline = time.monotonic() + within_s
    while True:
        urls = inspect(api, job_id, namespace).status.expose_urls or []
        found = [url for url in urls if f"--{order.proxied_port}." in url] or urls[:1]
        if found:
            gateway = {**order.config.get("gateway", {}), "public_url": found[0].rstrip("/")}
            return {**order.config, "gateway": gateway}
        if time.monotonic() > deadline:
            raise JobsError(f"the service names no address for port {order.proxied_port}: launch with another --expose")
        time.sleep(2.0)


def age_of_job(order: JobOrder, environ: Mapping[str, str]) -> float:
    """Seconds since the service started this job: its timeout counts what was installed before this process too.

    0 where the service does not say, or says what cannot be.
    """
    from jobs.errors import JobsError
    from jobs.hf import client, inspect, namespace_of

    job_id = environ.get("JOB_ID")
    if not job_id:
        return 0.0
    try:
        api = client()
        started_at = inspect(api, job_id, namespace_of(api, order.namespace)).started_at
    except JobsError as error:
        print(f"[job] WARNING: when this job was started is not known: {error}", file=sys.stderr, flush=True)
        return 0.0
    age_s = 0.0 if started_at is None else time.time() - started_at.timestamp()
    return age_s if 0 < age_s < order.timeout_s else 0.0  # else one of the two clocks is wrong


def _publish(order: JobOrder, folder: Path) -> str:
    from jobs.copies import publish
    from jobs.hf import client

    assert order.final is not None
    return publish(client(), order.final, folder, f"trained by harness-trainer, run {order.run}")
