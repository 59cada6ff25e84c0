"""Harbor's task.toml: which fields there are, what they mean here, and which cannot be honoured.

Owns the mapping from Harbor's names and defaults to `BoxSpec` and `Task`. The format is Harbor's `TaskConfig` (schema
1.4, harbor 0.26). A field that Harbor does not know is ignored, as Harbor does, with a finding; one that cannot be
honoured and would change what the agent or the tests see is refused.

Networks. What the agent can reach is [agent] network_mode if it is set, else [environment]'s, with the older
allow_internet = true / false read as "public" / "no-network". Where a task sets neither, Harbor gives it the internet;
here it gets `proxy-only`, so that a rollout reaches nothing but the gateway unless somebody asked. "no-network" is
`proxy-only` too (an agent must reach its model; Harbor lets it through as well), "allowlist" means whole hosts, every
port. The tests' network is [verifier]'s, else [environment]'s, and there "no-network" is `none`; None when neither is.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from capture_proxy.intercept.providers import parse_allowed
from harness_trainer.tasks.base import Artifact
from harness_trainer.tasks.fields import Fields
from sandboxes.base import BoxSpec, Healthcheck, Limits, Network, NetworkMode

DEFAULT_BUILD_TIMEOUT_S = 600.0
_PHASE = {"network_mode", "allowed_hosts"}
_ENVIRONMENT = (
    {"build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "memory", "storage", "gpus"}
    | {"gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "healthcheck", "workdir", "allow_internet"}
    | _PHASE
)
_HEALTHCHECK = {"command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries"}
_VERIFIER = {"timeout_sec", "env", "user", "environment_mode", "environment", "collect"} | _PHASE
_KNOWN: dict[tuple[str, ...], set[str]] = {
    (): {"schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution", "source"}
    | {"multi_step_reward_strategy", "steps", "artifacts"},
    ("task",): {"name", "version", "description", "authors", "keywords"},
    ("agent",): {"timeout_sec", "user"} | _PHASE,
    ("verifier",): _VERIFIER,
    ("environment",): _ENVIRONMENT,
    ("environment", "healthcheck"): _HEALTHCHECK,
    ("solution",): {"env"},
}
_MODES = ("no-network", "public", "allowlist")


def read_box(fields: Fields, name: str, folder: Path) -> BoxSpec:
    """What the agent's sandbox is made of. Raises TaskError."""
    environment = folder / "environment"
    has_dockerfile = (environment / "Dockerfile").is_file()
    image = fields.optional_text("environment", "docker_image")
    if (environment / "docker-compose.yaml").exists():
        raise fields.refuse("environment/docker-compose.yaml: several containers are not supported; use one Dockerfile")
    has_files = environment.is_dir() and any(environment.iterdir())
    if has_files and not has_dockerfile and image is None:
        raise fields.refuse("environment/ has files but no Dockerfile; add one, or set [environment] docker_image")
    return BoxSpec(
        name=name,
        build_dir=environment if has_files else None,
        image=image,
        env=fields.env("environment", "env"),
        workdir=fields.folder("environment", "workdir"),
        user=fields.user("agent", "user"),
        limits=_limits(fields),
        network=_agent_network(fields),
        healthcheck=_healthcheck(fields),
        build_timeout_s=fields.seconds("environment", "build_timeout_sec", default=DEFAULT_BUILD_TIMEOUT_S),
    )


def _limits(fields: Fields) -> Limits:
    sizes = {}
    for name in ("memory", "storage"):
        size, older = fields.whole("environment", f"{name}_mb"), fields.size_mb("environment", name)
        if size is not None and older is not None and size != older:
            raise fields.refuse(f"[environment] {name} says {older} MB and {name}_mb {size} MB; keep {name}_mb")
        sizes[name] = size if size is not None else older
    return Limits(cpus=fields.amount("environment", "cpus"), memory_mb=sizes["memory"], disk_mb=sizes["storage"])


def _healthcheck(fields: Fields) -> Healthcheck | None:
    if fields.get("environment", "healthcheck") is None:
        return None
    at = ("environment", "healthcheck")
    return Healthcheck(
        command=fields.text(*at, "command"),
        interval_s=fields.seconds(*at, "interval_sec", default=5.0, least=0),
        timeout_s=fields.seconds(*at, "timeout_sec", default=30.0),
        start_period_s=fields.seconds(*at, "start_period_sec", default=0.0, least=0),
        start_interval_s=fields.seconds(*at, "start_interval_sec", default=5.0, least=0),
        retries=fields.whole(*at, "retries") or 3,
    )


# --- networks ----------------------------------------------------------------------------------------------------


def _agent_network(fields: Fields) -> Network:
    asked = _asked(fields, "agent") or _asked(fields, "environment")
    return as_network(*asked, closed=NetworkMode.PROXY_ONLY) if asked else Network()


def read_verifier_network(fields: Fields) -> Network | None:
    """What the tests can reach; None when the task says nothing. Raises TaskError."""
    asked = _asked(fields, "verifier") or _asked(fields, "environment")
    return as_network(*asked, closed=NetworkMode.NONE) if asked else None


def as_network(mode: str, hosts: tuple[str, ...], closed: NetworkMode) -> Network:
    """Harbor's mode and hosts in our terms; `closed` is what "no-network" comes to."""
    if mode == "allowlist":
        return Network(NetworkMode.ALLOWLIST, hosts)
    return Network(NetworkMode.PUBLIC if mode == "public" else closed)


def _asked(fields: Fields, part: str) -> tuple[str, tuple[str, ...]] | None:
    """Mode and hosts that a part of the file sets; None when it sets none."""
    mode = fields.choice(part, "network_mode", among=_MODES)
    hosts = fields.texts(part, "allowed_hosts")
    internet = fields.flag(part, "allow_internet") if part == "environment" else None
    if mode is None and internet is not None and fields.get(part, "allowed_hosts") is None:
        mode = "public" if internet else "no-network"
    if hosts and mode != "allowlist":
        raise fields.refuse(f'[{part}] allowed_hosts needs network_mode = "allowlist"')
    return None if mode is None else (mode, tuple(_allowed(fields, part, host) for host in hosts))


def _allowed(fields: Fields, part: str, host: str) -> str:
    """An entry of Harbor's allow-list as ours: whole hosts, so every port."""
    entry = host.strip().lower().rstrip(".")
    if "/" in entry:
        raise fields.refuse(f"[{part}] allowed_hosts: {host!r} is a range of addresses; name the hosts, one by one")
    if ":" in entry:
        try:
            entry = f"[{ipaddress.IPv6Address(entry).compressed}]"  # Harbor writes it bare
        except ValueError:
            raise fields.refuse(f"[{part}] allowed_hosts: {host!r} has a port; name the host alone") from None
    try:
        return parse_allowed(f"{entry}:*")
    except ValueError:
        raise fields.wrong((part, "allowed_hosts"), host, "host names like mirror.example or *.files.example") from None


# --- the rest ----------------------------------------------------------------------------------------------------


def read_artifacts(fields: Fields) -> tuple[Artifact, ...]:
    """The files that the task declares as its result. Raises TaskError."""
    return tuple(_artifact(fields, item) for item in fields.list("artifacts"))


def _artifact(fields: Fields, item: Any) -> Artifact:
    if isinstance(item, str):
        item = {"source": item}
    if not isinstance(item, dict):
        raise fields.wrong(("artifacts",), item, "paths, or tables with `source`")
    one = Fields(f"{fields.where}: artifacts", item)
    source, destination = one.text("source"), item.get("destination") or None
    if one.get("service") not in (None, "main"):
        raise one.refuse(f"{source!r} is another container's (service = {item['service']!r}): not supported")
    if ".." in source.split("/") or "\0" in source:
        raise one.wrong(("source",), source, "a path without `..`")
    if destination is not None:
        parts = one.text("destination").split("/")
        if ".." in parts or parts[0] == "" or "\\" in destination or destination.rstrip("/") in (".", "manifest.json"):
            raise one.wrong(("destination",), destination, "a relative path without `..`, not manifest.json")
    return Artifact(source, destination, one.texts("exclude"))


def read_verifier_fresh(fields: Fields, folder: Path) -> bool:
    """Whether the tests need a sandbox of their own. Raises TaskError for one that is made of something else."""
    mode = fields.choice("verifier", "environment_mode", among=("shared", "separate"))
    own = fields.table("verifier", "environment")
    if mode == "shared" and own:
        raise fields.refuse('[verifier] environment_mode = "shared" and [verifier.environment] exclude each other')
    if own:
        raise fields.refuse("[verifier.environment] is not supported: tests run in the task's own image; leave it out")
    if mode != "separate":
        return False
    for name in ("Dockerfile", "docker-compose.yaml"):
        if (folder / "tests" / name).exists():
            raise fields.refuse(f"tests/{name}: an image of the tests' own is not supported; leave it out")
    return True


def refuse_unsupported(fields: Fields) -> None:
    """Parts of Harbor that would silently be missing, and the reward wrong. Raises TaskError."""
    if fields.get("steps"):
        raise fields.refuse("tasks of several steps ([[steps]]) are not supported; use one-step tasks")
    system = fields.get("environment", "os")
    if system is not None and str(system).lower() != "linux":
        raise fields.wrong(("environment", "os"), system, '"linux" (others are not supported)')
    if fields.whole("environment", "gpus", least=0):
        raise fields.refuse("[environment] gpus: sandboxes have no GPU; set it to 0 or leave the task out")
    if fields.get("environment", "tpu"):
        raise fields.refuse("[environment] tpu: sandboxes have no TPU; leave the task out")
    if fields.list("environment", "mcp_servers"):
        raise fields.refuse("[[environment.mcp_servers]]: agents are not connected to them; leave the task out")
    if fields.list("verifier", "collect"):
        raise fields.refuse(
            "[[verifier.collect]]: commands between agent and tests are not supported; do it in test.sh"
        )


def read_findings(fields: Fields, folder: Path) -> tuple[str, ...]:
    """What the file says that has no effect here."""
    found = []
    for path, known in _KNOWN.items():
        for name in sorted(set(fields.table(*path)) - known):
            field = ".".join((*path, name))
            found.append(f"unknown_field: `{field}` is not a field of task.toml and is ignored, as Harbor does")
    if fields.get("environment", "skills_dir"):
        found.append("skills_ignored: `environment.skills_dir` is not copied to the agent's skills folder")
    if not (folder / "environment").is_dir() and not fields.get("environment", "docker_image"):
        found.append("no_environment: no environment/ and no docker_image: the sandbox's default image is used")
    if (folder / "solution").is_dir() and not (folder / "solution" / "solve.sh").is_file():
        found.append("no_solution: solution/ holds no solve.sh, so `tasks check` cannot solve the task")
    if any((folder / part / ".harborignore").exists() for part in ("tests", "solution")):
        found.append("ignore_rules: .harborignore has no effect: all files of the folder are copied")
    if fields.get("verifier", "environment_mode") == "separate":
        found.append("separate_verifier: tests run in a fresh sandbox that also gets the workspace, not only artifacts")
    return tuple(found)
