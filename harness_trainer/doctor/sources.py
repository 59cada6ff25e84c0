"""Checks of where rollouts come from: tasks, agents, environments and their servers, of each of a run's sources.

Looks at files, names, keys and whether a server listens. It loads no person's code and downloads nothing: the run does
that itself before it starts anything slow (`workload`), and says what is wrong with the first source that has a fault.
"""

from __future__ import annotations

import importlib.util
import socket
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from harness_trainer.config import RunConfig, own_rollouts
from harness_trainer.doctor.base import Check
from harness_trainer.environments import (
    WHITE_BOX,
    OpenEnvConfig,
    OpenEnvHarborConfig,
    OrsConfig,
    SourceConfig,
)
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.rollouts.config import RolloutConfig

_CONNECT_S = 3.0


def check(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    """Of all sources; what is of one among several says so."""
    if has_sandboxes(config):
        yield _way_out(config)
        if config.rollouts.executor == "ray":
            yield _asked("Ray cluster", partial(_cluster, config.rollouts))
    for source in config.each_source:
        settings = own_rollouts(config.rollouts, source)
        checks = _white_box(source, environ) if isinstance(source.env, WHITE_BOX) else _agents(source, settings)
        for found in (*checks, *_server(source, environ)):
            yield replace(found, name=f"source {source.name}: {found.name}") if source.name else found


def has_sandboxes(config: RunConfig) -> bool:
    """Whether any source has agents in sandboxes of ours."""
    return any(source.env.type == "own" for source in config.each_source)


def needs_docker(config: RunConfig) -> bool:
    """For sandboxes of this machine, or for an environment's server in a container."""
    servers = any(isinstance(one.env, OpenEnvConfig) and one.env.kind == "docker" for one in config.each_source)
    here = config.rollouts.executor == "local"  # else each node looks for its own when it is opened
    return servers or (here and config.sandbox.type == "docker" and has_sandboxes(config))


def _way_out(config: RunConfig) -> Check:
    from harness_trainer.workload import require_way_out

    def found() -> str:
        require_way_out(config)
        return "there is one"

    return _asked("sandboxes' way to the gateway", found)


def _cluster(settings: RolloutConfig) -> str:
    from harness_trainer.rollouts.on_ray.precheck import require_cluster

    return require_cluster(settings.ray, settings.max_concurrent)


def _agents(source: SourceConfig, settings: RolloutConfig) -> Iterator[Check]:
    """A server's agents and tasks are the server's."""
    from harness_trainer.rollouts.mix import load_mix

    if source.env.type != "own":
        return
    for name, spec in (("tasks", source.tasks), ("tasks to evaluate on", source.evaluation)):
        if spec is not None:
            yield _asked(name, partial(_tasks, spec))
    harness = source.harness or str(RunConfig.model_fields["harness"].default)
    yield _asked("agents", lambda: ", ".join(load_mix(harness, [], settings).harnesses))


def _tasks(spec: str) -> str:
    from harness_trainer.tasks import load_tasks
    from harness_trainer.tasks.hub import as_dataset

    words = [] if Path(spec).exists() else [word.strip() for word in spec.split(",")]
    if any(as_dataset(word) is not None for word in words):
        return f"{spec}: on the Hub, so the run itself looks at them"
    return f"{len(load_tasks(spec))} in {spec}"


def _white_box(source: SourceConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    env = source.env
    if isinstance(env, OrsConfig):
        missing = [name for name in ("openreward", "aiohttp") if importlib.util.find_spec(name) is None]
        fix = "pip install 'harness-trainer[ors]'"
        yield Check("OpenReward's SDK", not missing, f"without {', '.join(missing)}" if missing else "there", fix)
        yield _asked("keys and secrets", partial(_keys, env))
        return
    for name, rows in (("rows", source.tasks), ("rows to evaluate on", source.evaluation)):
        if rows is not None:
            yield _asked(name, partial(_rows, rows))
    target = env.named if isinstance(env, OpenEnvConfig) else getattr(env, "target", "")
    is_code = not isinstance(env, OpenEnvConfig) or env.kind in ("local", "python")
    for named in ([target] if is_code else []) + list(getattr(env, "rewards", [])):
        yield _code(named)


def _keys(env: OrsConfig) -> str:
    from harness_trainer.loops.ors.credentials import read_credentials

    read_credentials(env)
    return "there"


def _rows(path: str) -> str:
    from harness_trainer.loops.rows import load_rows

    return f"{len(load_rows(Path(path).expanduser()))} in {path}"


def _code(target: str) -> Check:
    """The file or the outermost package of `file.py:Name` or `package.module:Name`; it is not run."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        return Check(target, Path(where).expanduser().is_file(), "the file", "give the path of a file that is there")
    package = where.partition(".")[0]
    found = bool(package) and importlib.util.find_spec(package) is not None
    fix = f"install {package or 'it'}, add its folder to PYTHONPATH, or give file.py:Name"
    return Check(target, found, "can be found" if found else "no such package", fix)


def _server(source: SourceConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    env = source.env
    variable = getattr(env, "token_env", None)
    if variable is not None and not isinstance(env, OrsConfig):
        there = bool(environ.get(variable))
        yield Check(f"token {variable}", there, "set" if there else "not set", f"export {variable}=...")
    if isinstance(env, OpenEnvHarborConfig):
        yield listens(env.url)
    elif isinstance(env, OpenEnvConfig) and env.shared_server is not None:
        yield listens(env.shared_server)
    elif isinstance(env, OrsConfig) and env.is_url:
        yield listens(env.target)


def listens(url: str) -> Check:
    """Whether somebody takes connections there; what it is, the run asks."""
    shown = url.rpartition("@")[2]  # without what may be a password
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        return Check(f"server {shown}", False, f"no address: {error}", "write it as http://HOST:PORT")
    if not host:
        return Check(f"server {shown}", False, "no address", "write it as http://HOST:PORT")
    name = f"server {parts.scheme}://{host}:{port}"
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return Check(name, True, "behind a proxy: not looked at", required=False)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return Check(name, False, f"{error.strerror or error}", "start it, or correct its address")
    return Check(name, True, "listens")


def _asked(name: str, question: Callable[[], str]) -> Check:
    try:
        return Check(name, True, question())
    except HarnessTrainerError as error:
        return Check(name, False, "cannot be used", str(error))
