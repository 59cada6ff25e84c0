"""From the arguments of `launch hf-jobs` to what is sent: one run's config, and the job around it.

Owns the options, what must go together, and the order; asks nobody and starts nothing. Called by `launch_hf`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.cli.launch_hf_packages import require_usable
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError
from harness_trainer.job_order import JobOrder

if TYPE_CHECKING:
    from jobs.hf import JobInfo, Order

PORT = 8000  # of the gateway, where the service's own proxy leads to it
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")  # what a label takes
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_INSIDE = ("harness-trainer", "launch", "inside")


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments, checked. `config` is the run's, with the job's way to the gateway in it."""

    config: RunConfig
    run: str
    runs: str
    flavor: str
    timeout_s: int
    margin_s: float
    image: str | None
    packages: tuple[str, ...]
    setup: tuple[str, ...]
    secrets: tuple[str, ...]
    variables: dict[str, str]
    volumes: tuple[str, ...]
    final: str | None
    attempts: int | None
    namespace: str | None
    proxied: bool
    detach: bool
    dry_run: bool

    @property
    def repos(self) -> list[str]:
        """That are written to."""
        return [repo for repo in (self.runs, self.final) if repo is not None and not repo.startswith("/")]


def add_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument("--flavor", required=True, help="machine, e.g. a10g-large (`hf jobs hardware` lists them)")
    job.add_argument("--timeout", required=True, help="the job's longest life: 90m, 6h, 2d")
    job.add_argument("--run", default="train", help="name of the run; launched again, it goes on (default: train)")
    job.add_argument(
        "--runs",
        required=True,
        metavar="OWNER/REPO|/MOUNT",
        help="where copies of the run are kept: a Hub repository, or a folder of a --volume",
    )
    job.add_argument("--final", metavar="OWNER/REPO", help="repository for the trained model")
    job.add_argument("--image", help="Docker image with harness-trainer and its engine, or hf.co/spaces/OWNER/NAME")
    job.add_argument(
        "--package",
        action="append",
        default=[],
        help="what uv is to install instead, e.g. 'harness-trainer[e2b]==0.1.0', with the extra of the "
        "sandboxes; repeatable",
    )
    job.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="variable of this shell that the job gets, encrypted, beside HF_TOKEN and the sandboxes' key; repeatable",
    )
    job.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable for the job that is no secret; repeatable",
    )
    job.add_argument("--volume", action="append", default=[], metavar="hf://...:/MOUNT[:ro]", help="repeatable")
    job.add_argument(
        "--expose",
        choices=["direct", "cloudflared", "gradio", "command"],
        help="sandboxes' way to the gateway; direct = the service's own proxy (default where they are elsewhere)",
    )
    job.add_argument(
        "--margin", help="before the timeout, for a last checkpoint and copy (default: a tenth, 2 to 15 minutes)"
    )
    job.add_argument(
        "--attempts", type=int, help="starts, the first included, that the service makes of a job that fails"
    )
    job.add_argument("--namespace", help="user or organization that runs and pays for it (default: the token's own)")
    job.add_argument("--detach", action="store_true", help="do not follow the job")
    job.add_argument(
        "--dry-run", action="store_true", help="print exactly what would be sent, secrets masked, and stop"
    )
    run = parser.add_argument_group("the run, as `harness-trainer train` takes it")
    run.add_argument("--config", type=Path, help="YAML file with any of the settings below")
    add_flags(run, RunConfig, {})


def asked_of(options: argparse.Namespace) -> Asked:
    """Raises ConfigError, JobsError."""
    from jobs.hf import seconds

    if options.expose is not None:
        setattr(options, "gateway.expose.type", options.expose)
    config = resolve(RunConfig, options, {}, options.config)
    timeout_s = seconds(options.timeout)
    margin_s = min(900.0, max(120.0, timeout_s / 10)) if options.margin is None else float(seconds(options.margin))
    if timeout_s <= 2 * margin_s:
        raise ConfigError(
            f"--timeout {options.timeout} leaves no time to train before the --margin of {margin_s:.0f} s"
        )
    if not options.image and not options.package:
        raise ConfigError("give --image (with harness-trainer and its engine in it), or --package for uv to install")
    if not _NAME.fullmatch(options.run):
        raise ConfigError(f"--run {options.run!r}: use letters, digits, - and _")
    for package in options.package:
        if re.search(r"https?://[^/@\s]+@", package):
            raise ConfigError(
                "--package: the address has a name or a token in it, and whoever sees the job sees its command: give a "
                "package that can be had without, or an --image"
            )
    _check_places(options)
    proxied, config = _opened(config)
    _check_config(config)
    if options.package:
        e2b = _has_sandboxes(config) and config.sandbox.type == "e2b"
        require_usable(options.package, options.image, config, e2b=e2b)
    return Asked(
        config=config,
        run=options.run,
        runs=options.runs,
        flavor=options.flavor,
        timeout_s=timeout_s,
        margin_s=margin_s,
        image=options.image,
        packages=tuple(options.package),
        setup=("engine",) if options.package else (),
        secrets=_secret_names(options.secret, config),
        variables=dict(_variable(text) for text in options.variable),
        volumes=tuple(options.volume),
        final=options.final,
        attempts=options.attempts,
        namespace=options.namespace,
        proxied=proxied,
        detach=options.detach,
        dry_run=options.dry_run,
    )


def make(asked: Asked, secrets: Mapping[str, str]) -> Order:
    """What is sent. Raises JobsError."""
    from jobs.hf import LABEL, ORDER, UV_IMAGE, Order, by_uv, volume

    inside = JobOrder(
        config=asked.config.model_dump(mode="json"),
        run=asked.run,
        runs=asked.runs,
        timeout_s=asked.timeout_s,
        margin_s=asked.margin_s,
        final=asked.final,
        secrets=list(asked.secrets),
        proxied_port=PORT if asked.proxied else None,
        namespace=asked.namespace,
        setup=list(asked.setup),
    )
    return Order(
        command=by_uv(asked.packages, _INSIDE) if asked.packages else _INSIDE,
        flavor=asked.flavor,
        timeout_s=asked.timeout_s,
        image=asked.image or UV_IMAGE,
        # A bar that moves is a line of the job's log each time.
        env={"HF_HUB_DISABLE_PROGRESS_BARS": "1", **asked.variables, ORDER: inside.model_dump_json()},
        secrets=dict(secrets),
        labels={LABEL: asked.run, "name": f"harness-trainer-{asked.run}"},
        volumes=tuple(volume(text) for text in asked.volumes),
        public_ports=(PORT,) if asked.proxied else (),
        attempts=asked.attempts,
        namespace=asked.namespace,
    )


def order_in(job: JobInfo) -> JobOrder:
    """What a job of ours was told. Raises ConfigError for a stranger's, or one of another version."""
    from harness_trainer.cli.launch_inside import read_order
    from jobs.hf import ORDER

    environment = job.environment or {}
    if ORDER not in environment:
        raise ConfigError(f"job {job.id} is none of harness-trainer's: `hf jobs inspect {job.id}` shows what it is")
    return read_order(environment)


def again(
    job: JobInfo, namespace: str, secrets: Mapping[str, str], *, flavor: str | None, timeout_s: int | None
) -> Order:
    """The same job once more. A secret that is not given has no value; the names are the job's. Raises ConfigError."""
    from jobs.hf import ORDER, Order

    before = order_in(job)
    inside = before
    if timeout_s is not None:
        inside = before.model_copy(update={"timeout_s": timeout_s, "margin_s": min(before.margin_s, timeout_s / 4)})
    return Order(
        command=tuple(job.command or ()),
        flavor=flavor or str(getattr(job.flavor, "value", job.flavor)),
        timeout_s=round(inside.timeout_s),
        image=job.docker_image or f"hf.co/spaces/{job.space_id}",
        env={**(job.environment or {}), ORDER: inside.model_dump_json()},
        secrets={name: secrets.get(name, "") for name in before.secrets},
        labels=dict(job.labels or {}),
        volumes=tuple(job.volumes or ()),
        public_ports=() if before.proxied_port is None else (before.proxied_port,),
        attempts=None if not job.retry else job.retry + 1,
        namespace=namespace,
    )


def secret_values(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """By name, of those that have a value here. The Hub's token may be in its own file."""
    from jobs.hf import saved_token

    values = {name: environ[name] for name in names if environ.get(name, "").strip()}
    if "HF_TOKEN" in names and "HF_TOKEN" not in values and (token := saved_token()):
        values["HF_TOKEN"] = token
    return values


def _opened(config: RunConfig) -> tuple[bool, RunConfig]:
    """Whether the service's own proxy leads to the gateway, and the config that goes with it."""
    gateway = config.gateway
    elsewhere = _has_sandboxes(config) and config.sandbox.type in ("e2b", "harbor")
    usual = gateway.expose.type == "none" and elsewhere
    if gateway.public_url is not None or not (usual or gateway.expose.type == "direct"):
        return False, config
    opened = gateway.model_copy(update={"expose": _direct(), "public_url": None})
    return True, config.model_copy(update={"gateway": opened})


def _has_sandboxes(config: RunConfig) -> bool:
    return any(source.env.type == "own" for source in config.each_source)


def _direct() -> Any:
    from harness_trainer.expose import DirectExpose

    return DirectExpose(listen=f"0.0.0.0:{PORT}")


def _secret_names(given: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    for name in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"--secret {name.partition('=')[0]!r}: give the name alone; its value is taken from this shell"
            )
    own = ["HF_TOKEN"]
    if _has_sandboxes(config) and config.sandbox.type == "e2b":
        own.append("E2B_API_KEY")
    return tuple(dict.fromkeys([*own, *given]))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--variable {text!r}: write NAME=VALUE")
    if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name.upper()):
        raise ConfigError(f"--variable {name}: that looks like a secret; export it and give --secret {name}")
    return name, value


def _check_places(options: argparse.Namespace) -> None:
    from jobs.hf import volume

    mounts = [one.mount_path for one in map(volume, options.volume) if one.type == "bucket" and not one.read_only]
    if options.runs.startswith("/"):
        if not any(Path(options.runs).is_relative_to(mount) for mount in mounts):
            raise ConfigError(f"--runs {options.runs} is in no --volume that can be written: it would end with the job")
    elif not _REPO.fullmatch(options.runs):
        raise ConfigError(f"--runs {options.runs!r}: write OWNER/REPO, or /FOLDER of a --volume")
    if options.final is not None and not _REPO.fullmatch(options.final):
        raise ConfigError(f"--final {options.final!r}: write OWNER/REPO")


def _is_here(word: str) -> bool:
    """A path of this machine, alone or with what is meant of it: `games.py:Game`."""
    return any(Path(path).exists() for path in (word, word.rpartition(":")[0]) if path)


def _check_config(config: RunConfig) -> None:
    """What cannot be in a job. Raises ConfigError."""
    if _has_sandboxes(config) and config.sandbox.type == "docker":
        raise ConfigError("a job has no Docker engine: use --sandbox e2b, or --sandbox harbor:NAME for another service")
    places: list[tuple[str, str | None]] = [("model", config.model), ("rollouts.reward", config.rollouts.reward)]
    for source in config.each_source:
        evaluation = source.evaluation if isinstance(source.evaluation, str) else None
        places += [("tasks", source.tasks), ("harness", source.harness), ("rollouts.evaluation.tasks", evaluation)]
        places.append(("env", getattr(source.env, "target", None)))
    for name, value in places:
        if value is None or value == "examples" or value.startswith("/"):
            continue  # an absolute path is the job's: in the image or on a volume
        if any(_is_here(word.strip()) for word in value.split(",")):
            raise ConfigError(
                f"--{name} {value} is a path of this machine, and the job runs on another: push it to the Hub "
                "(hf:OWNER/NAME), or put it in the image or on a --volume and give its absolute path there"
            )
