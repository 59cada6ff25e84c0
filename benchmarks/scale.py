"""What one gateway, one runner and one Docker host carry: the figures of docs/scale.md.

    python -m benchmarks.scale [gateway] [sessions] [runner] [idle] [docker] [--quick]

`docker` only where DOCKER_HOST or Docker's default socket answers; the rest needs Linux and nothing more. Without
parts: all, in this order. `--quick` takes the smallest numbers that go through everything; its figures mean nothing.
On a machine that others use as well, `chrt -r 1` in front gives it the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import scale_docker, scale_gateway, scale_runner
from benchmarks.process_use import machine
from benchmarks.sandboxes import IMAGES
from benchmarks.sandboxes import docker as docker_says

PARTS = ("gateway", "sessions", "runner", "idle", "docker")
_LEVELS = {False: [10, 100, 250, 500, 1000], True: [10, 100, 500]}  # of open streams, by `Streams.in_step`


def gateway(folder: Path, options: argparse.Namespace) -> str:
    quick = options.quick
    texts = []
    for in_step in (False, True):
        length = (
            {"tokens": 5, "measure_s": 0.5, "warm_s": 0.1, "interval_ms": 50.0}
            if quick
            else {"measure_s": options.seconds}
        )
        streams = scale_gateway.Streams(in_step=in_step, transport=options.transport, **length)
        levels = []
        for num in options.streams or ([2, 4] if quick else _LEVELS[in_step]):
            own = folder / f"{num}-{in_step}"
            own.mkdir()
            levels.append(scale_gateway.level(own, num, streams))
            print(f"{num} streams: done", file=sys.stderr, flush=True)
        texts.append(scale_gateway.report(levels, streams))
        if not in_step:
            long = levels[len(levels) // 2]
            own = folder / "short"
            own.mkdir()
            short = scale_gateway.level(own, long.num_streams, replace(streams, tokens=streams.tokens // 5))
            call_s, piece_s = scale_gateway.price(long, short)
            texts.append(
                f"gateway's CPU: {1000 * call_s:.2f} ms for a call, {1e6 * piece_s:.0f} us for a piece of text"
            )
    return "\n\n".join(texts)


def sessions(folder: Path, options: argparse.Namespace) -> str:
    num, idle_s = (50, 0.5) if options.quick else (options.sessions, 10.0)
    return scale_gateway.report_held(scale_gateway.held_sessions(folder, num, idle_s=idle_s))


def runner(folder: Path, options: argparse.Namespace) -> str:
    times = {"seconds": 1.0, "settle_s": 0.5} if options.quick else {"seconds": 60.0, "settle_s": 10.0}
    levels = []
    for num in options.sandboxes or ([10] if options.quick else [100, 500, 1000]):
        levels.append(scale_runner.carried(folder / str(num), num, **times))
        print(f"{num} sandboxes: done", file=sys.stderr, flush=True)
    size = {"agent_s": 0.1, "seconds": 1.0} if options.quick else {"agent_s": 5.0, "seconds": 30.0}
    turning = scale_runner.turnover(folder / "turnover", 10 if options.quick else 50, **size)
    return scale_runner.report(levels, turning)


def idle(folder: Path, options: argparse.Namespace) -> str:
    return scale_runner.report_idle(scale_runner.idle(folder, quiet_s=2.0, docker=_has_docker() and not options.quick))


def docker(folder: Path, options: argparse.Namespace) -> str:
    if not _has_docker():
        return "no Docker engine answers: left out"
    here = docker_says("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    image = next((name for name in IMAGES if name in here), IMAGES[0])
    num, at_once = (2, [2]) if options.quick else (options.boxes, [1, 2, 4, 8])
    return scale_docker.report(asyncio.run(scale_docker.costs(folder, image, num, at_once)))


def _has_docker() -> bool:
    try:
        return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", help="levels of `gateway`")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured time of a level of `gateway`")
    parser.add_argument("--transport", choices=["generate", "chat"], default="generate")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--sandboxes", type=int, nargs="+", help="levels of `runner`")
    parser.add_argument("--boxes", type=int, default=15, help="sandboxes of `docker`; each is two containers")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    parts: dict[str, Callable[[Path, argparse.Namespace], str]] = {
        "gateway": gateway,
        "sessions": sessions,
        "runner": runner,
        "idle": idle,
        "docker": docker,
    }
    scale_gateway.more_files()
    for name in PARTS:
        if not options.parts or name in options.parts:
            with tempfile.TemporaryDirectory(prefix=f"scale-{name}-") as folder:
                text = parts[name](Path(folder), options)
            print(f"\n## {name} ({machine()})\n\n{text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
