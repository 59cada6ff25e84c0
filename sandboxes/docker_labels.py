"""What is written on every object made in a Docker engine, so that it is never without an owner.

Owns the labels of containers, networks, volumes and images, and the judgement of what nobody owns any more. Needs no
Docker SDK and asks no engine: `docker`, `docker_images`, `docker_network` and `docker_relay` put the labels on,
`docker_reaping` reads them.

A built image is a cache for everybody, so it carries other labels: a container that a person starts from it inherits
them, and must not look like ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sandboxes.ownership import Claim, Owner, recorded

PROJECT = "harness-trainer"
CLAIM = f"{PROJECT}.claim"  # the filter `label=harness-trainer.claim` finds every object that has an owner
KIND = f"{PROJECT}.kind"
RUN = f"{PROJECT}.run"
REGISTRY = f"{PROJECT}.registry"
MACHINE = f"{PROJECT}.machine"
BUILD = "build"  # kind of the volume that exists while an image is built
_OWNER = f"{PROJECT}.owner."

LAYER = f"{PROJECT}.layer"  # on every layer that a build of ours adds, also of a build that was cut short
BUILT_BY, BUILT_FOR, BUILT_RUN, CONTENT = (f"{PROJECT}.built.{name}" for name in ("by", "for", "run", "content"))


def engine_address(host: str | None = None) -> str:
    """The engine meant: `host`, else $DOCKER_HOST, else Docker's own socket. Example: "unix:///var/run/docker.sock"."""
    return host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def engine_of(address: str) -> str:
    """What `Claim.engine` says for things in the Docker engine at `address`."""
    return f"docker:{address}"


def machine_id() -> str:
    """Tells two machines of one name apart that share an engine; "" = unknown."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Mark:
    """The labels of one object, read back.

    Example: Mark("sandbox-412-98213-0a1b2c3d", "container", "night-3", Owner(412, ..), Path("/home/me/.."), "5f3c..").
    """

    claim_id: str
    kind: str  # "container", "relay", "network", "volume" or what its maker calls it
    run_id: str
    owner: Owner  # who made it; who owns it now is on record
    registry: Path
    machine: str  # `machine_id` of the maker


def labels_of(claim: Claim, kind: str) -> dict[str, str]:
    """The labels of a container, network or volume that `claim` owns.

    All keys are always there: a container inherits its image's labels, and an image committed from a sandbox has ours.
    """
    owner = {f"{_OWNER}{name}": str(value) for name, value in asdict(claim.owner).items()}
    return {
        CLAIM: claim.id,
        KIND: kind,
        RUN: claim.run_id,
        REGISTRY: str(claim.registry.absolute()),
        MACHINE: machine_id(),
        **owner,
    }


def image_labels(claim: Claim, *, task: str, content: str) -> dict[str, str]:
    """The labels of a built image: by whom and for what, for people; no claim."""
    owner = claim.owner
    built_by = f"{owner.host} pid {owner.pid} start {owner.start_ticks} boot {owner.boot_id}"
    return {BUILT_BY: built_by, BUILT_FOR: task, BUILT_RUN: claim.run_id, CONTENT: content}


def read_mark(labels: Mapping[str, str] | None) -> Mark | None:
    """None when the object is not ours, or its labels are damaged: then it is nobody's to remove."""
    labels = labels or {}
    try:
        values = {f.name: labels[_OWNER + f.name] for f in fields(Owner)}
        pid, ticks = int(values.pop("pid")), int(values.pop("start_ticks"))
        owner = Owner(pid=pid, start_ticks=ticks, **values)
        return Mark(labels[CLAIM], labels[KIND], labels[RUN], owner, Path(labels[REGISTRY]), labels[MACHINE])
    except (KeyError, ValueError):
        return None


def dead_owner(labels: Mapping[str, str] | None, here: Owner) -> bool:
    """Whether the object is ours and nobody owns it any more. False when that cannot be known from here.

    The record wins over the labels, which cannot be changed when a sandbox is adopted, or kept for a successor.
    """
    mark = read_mark(labels)
    if mark is None:
        return False
    claim = recorded(mark.registry, mark.claim_id, here)
    if claim is not None:
        return claim.is_abandoned(here)
    if mark.owner.boot_id != here.boot_id and (not mark.machine or mark.machine != machine_id()):
        return False  # perhaps another machine with this one's name
    return mark.owner.alive(here) is False
