"""What is in a Docker engine, for tests that count before and after, on an engine that others use too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker

from sandboxes.docker_api import connect
from sandboxes.docker_labels import CLAIM, LAYER, REGISTRY, engine_of
from sandboxes.ownership import Claim, claim

LABELS = (CLAIM, LAYER)


def objects_of(api: docker.APIClient, registry: Path) -> list[str]:
    """Every container, network, volume and image whose labels name this registry of records."""
    wanted = {"label": [f"{REGISTRY}={registry.absolute()}"]}
    return [
        *("container " + c["Names"][0] for c in api.containers(all=True, filters=wanted)),
        *("network " + n["Name"] for n in api.networks(filters=wanted)),
        *("volume " + v["Name"] for v in api.volumes(filters=wanted)["Volumes"] or []),
        *("image " + i["Id"] for i in api.images(filters=wanted)),
    ]


def layers(api: docker.APIClient, content: str) -> list[str]:
    """Untagged images, leaves and intermediates alike, and containers that ran a step with this text in its command."""
    found = [
        f"image {i['Id'][7:19]}"
        for i in api.images(all=True)
        if not [t for t in i["RepoTags"] or [] if t != "<none>:<none>"] and content in str(api.history(i["Id"]))
    ]
    return found + [f"container {c['Id'][:12]}" for c in api.containers(all=True) if content in c["Command"]]


def dead_claim(registry: Path, kind: str, engine: str, **owner: object) -> Claim:
    """A record as a dead process of this machine would have left it."""
    made = claim(registry, kind, run_id="dead", engine=engine_of(engine))
    made.release()
    gone = replace(made.owner, **{"start_ticks": made.owner.start_ticks - 1, **owner})  # type: ignore[arg-type]
    made.id = f"{kind}-{gone.pid}-{gone.start_ticks}-{os.urandom(4).hex()}"
    made.owner = gone
    made.created_at -= 3600
    made.save()
    return made


@contextlib.contextmanager
def opened(engine: str) -> Iterator[docker.APIClient]:
    with contextlib.closing(connect(engine)) as api:
        yield api
