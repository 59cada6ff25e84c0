"""`harness-trainer clean`: end and remove what dead runs left behind. Never touches a live run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandboxes.lifecycle import LifecycleError, Reaped, default_registry, reap


def run(argv: Sequence[str]) -> int:
    options = _options(argv)
    left = list(reap(default_registry(), dry_run=options.dry_run))
    try:
        left += _in_engine(options.dry_run)
        left += _in_e2b(options.dry_run)
        images = _unused_images(options.unused_days, options.dry_run) if options.images else []
    except LifecycleError as error:
        print(f"harness-trainer: {error}", file=sys.stderr)
        images = []
    would = "would be " if options.dry_run else ""
    for item in left:
        print(item)
    for name in images:
        print(f"image {name}, not used for {options.unused_days:g} days")
    count = len(left) + len(images)
    print(f"{count} left-overs {would}removed" if count else "nothing was left behind")
    return 1 if any(item.problem for item in left) and not options.dry_run else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="harness-trainer clean",
        description="End and remove what runs that died left: processes, temporary folders, and in the Docker engine "
        "containers, networks, volumes and layers of unfinished images, and sandboxes in E2B when E2B_API_KEY is set. "
        "Live runs are left alone.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--images", action="store_true", help="also remove built images that no run used for a while")
    parser.add_argument("--unused-days", type=float, default=14.0, metavar="N", help="the while of --images (14)")
    return parser.parse_args(argv)


def _engine_address() -> str | None:
    """The engine to look into for things whose record is lost; None = there is none, and Docker is not even loaded."""
    from sandboxes.docker_labels import engine_address
    from sandboxes.extras import is_installed

    if not is_installed("docker"):
        return None
    address = engine_address()
    if "DOCKER_HOST" not in os.environ and not Path(address.removeprefix("unix://")).exists():
        return None
    return address


def _in_engine(dry_run: bool) -> Iterable[Reaped]:
    address = _engine_address()
    if address is None:
        return []
    from sandboxes.docker_reaping import sweep

    ended = sweep(address, dry_run=dry_run)
    return [Reaped(name, "engine", 0, [], e.problem, [str(t) for t in e.things]) for name, e in ended.items()]


def _in_e2b(dry_run: bool) -> Iterable[Reaped]:
    """Sandboxes in E2B whose record is lost; without a key there is nobody to ask, and the SDK is not even loaded."""
    from sandboxes.extras import is_installed

    if not os.environ.get("E2B_API_KEY") or not is_installed("e2b"):
        return []
    from sandboxes.e2b_reaping import sweep

    ended = sweep(dry_run=dry_run)
    return [Reaped(name, "e2b", 0, [], e.problem, [str(t) for t in e.things]) for name, e in ended.items()]


def _unused_images(days: float, dry_run: bool) -> list[str]:
    address = _engine_address()
    if address is None:
        return []
    from sandboxes.docker_images import remove_unused

    return remove_unused(address, days=days, dry_run=dry_run)
