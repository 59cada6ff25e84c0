"""What one sandbox costs a Docker host: memory, processes, open files, networks, and how many can be started a second.

Sandboxes as a run has them (network mode proxy-only: a container and its relay), each with an agent that sleeps and a
runner that waits for its end. Times beside the `docker` command line, and what 64 rollouts leave behind, are
`benchmarks.sandboxes`'s. Called by `scale`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.process_use import MB, Use, table
from benchmarks.sandboxes import docker
from sandboxes import open_backend
from sandboxes.base import Access, BoxSpec, Command, Endpoint, Network, NetworkMode, Sandbox
from sandboxes.docker import DockerConfig


@dataclass(frozen=True, slots=True)
class Part:
    """Of one kind of process, for one sandbox."""

    pss: float  # MB
    num_processes: float
    num_threads: float
    num_files: float


@dataclass(frozen=True, slots=True)
class Costs:
    """`started_s`: sandboxes started a second, by how many at once. `grown`: PSS in MB per sandbox of the engine's own
    processes; `networks`: made for all sandboxes together."""

    num: int
    parts: dict[str, Part]
    grown: float
    controller_threads: float
    controller_files: float
    networks: int
    started_s: dict[int, float]
    stopped_s: float
    charged: float  # MB that the kernel charges to both containers, its own memory for them included


class Host:
    """The engine's processes, and those of this benchmark's containers."""

    def __init__(self, run_id: str) -> None:
        self._label = f"label=harness-trainer.run={run_id}"

    def containers(self) -> dict[str, tuple[str, int]]:
        """Id -> name and first process."""
        ids = docker("ps", "-q", "--no-trunc", "--filter", self._label).split()
        if not ids:
            return {}
        lines = docker("inspect", "--format", "{{.Id}} {{.Name}} {{.State.Pid}}", *ids).splitlines()
        return {words[0]: (words[1], int(words[2])) for words in map(str.split, lines)}

    def parts(self, num: int) -> dict[str, Part]:
        found: dict[str, list[psutil.Process]] = {"sandbox": [], "relay": [], "shims": []}
        for name, pid in self.containers().values():
            first = psutil.Process(pid)
            found["relay" if name.endswith("-net") else "sandbox"] += [first, *first.children(recursive=True)]
            if (shim := first.parent()) is not None:
                found["shims"].append(shim)
        return {name: _part(processes, num) for name, processes in found.items()}

    def engine(self) -> float:
        """PSS in MB of dockerd and containerd."""
        names = ("dockerd", "containerd")
        pids = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in names]
        return Use.of(*pids).pss

    def charged(self) -> float:
        """MB of all containers, by `docker stats`."""
        ids = list(self.containers())
        lines = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", *ids).splitlines() if ids else []
        return sum(_in_mb(line.split("/")[0].strip()) for line in lines)


def _part(processes: Sequence[psutil.Process], num: int) -> Part:
    pss, threads, files = 0.0, 0, 0
    for process in processes:
        pss += process.memory_full_info().pss / MB
        threads += process.num_threads()
        files += process.num_fds()
    return Part(pss / num, len(processes) / num, threads / num, files / num)


def _in_mb(text: str) -> float:
    """Of Docker's words for a size. Example: "6.5MiB" is 6.8."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
    unit = next(unit for unit in units if text.endswith(unit))
    return float(text.removesuffix(unit)) * units[unit] / MB


async def costs(folder: Path, image: str, num: int, at_once: Sequence[int]) -> Costs:
    """At most `num` sandboxes at a time, two containers each; no relay is started ahead, so that each counts once."""
    started_s = {}
    for places in at_once[:-1]:
        async with _Sandboxes(folder / f"at-once-{places}", image, f"scale-{secrets.token_hex(4)}", places) as boxes:
            started_s[places] = num / await boxes.start(num)
    run_id = f"scale-{secrets.token_hex(4)}"
    host, places = Host(run_id), at_once[-1]
    before, networks = host.engine(), _num_networks()
    own = Use.of(psutil.Process().pid)
    threads = psutil.Process().num_threads()
    async with _Sandboxes(folder / "cost", image, run_id, places) as boxes:
        started_s[places] = num / await boxes.start(num)
        waiting = [asyncio.create_task(box.wait_job(await box.start_job(_AGENT))) for box in boxes.started]
        await asyncio.sleep(3.0)  # every wait is under way
        found = host.parts(num)
        grown, charged, made = (host.engine() - before) / num, host.charged() / num, _num_networks() - networks
        mine = Use.of(psutil.Process().pid)
        more_threads = psutil.Process().num_threads() - threads
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        began = time.monotonic()
        await asyncio.gather(*(box.stop() for box in boxes.started))
        stopped_s = num / (time.monotonic() - began)
    left = host.containers()
    if left:
        raise RuntimeError(f"{len(left)} containers of this benchmark are left: {left}")
    more_files = (mine.num_files - own.num_files) / num
    return Costs(num, found, grown, more_threads / num, more_files, made, started_s, stopped_s, charged)


_AGENT = Command(["sleep", "infinity"])


def _num_networks() -> int:
    return len(docker("network", "ls", "-q").split())


class _Sandboxes:
    """A backend and the sandboxes that were started in it; all end with it."""

    def __init__(self, folder: Path, image: str, run_id: str, places: int) -> None:
        config = DockerConfig(image=image, relay_base=image, max_creating=places, spare_relays=0)
        access = Access(gateway=Endpoint(url="http://127.0.0.1:9"))  # nobody calls it
        self._backend = open_backend(config, run_id=run_id, registry=folder / "owned", access=access)
        self._spec = BoxSpec("scale", network=Network(NetworkMode.PROXY_ONLY))
        self._stack = AsyncExitStack()
        self.started: list[Sandbox] = []

    async def __aenter__(self) -> _Sandboxes:
        await self._stack.enter_async_context(self._backend)
        try:
            await self._backend.prepare(self._spec)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def start(self, num: int) -> float:
        """All at once, as far as the backend lets them; the seconds until the last is there."""
        boxes = [self._backend.sandbox(self._spec) for _ in range(num)]
        began = time.monotonic()
        self.started = list(await asyncio.gather(*map(self._stack.enter_async_context, boxes)))
        return time.monotonic() - began


def report(found: Costs) -> str:
    rows = [
        [f"{name}, of one sandbox", *(f"{value:.1f}" for value in _numbers(part))] for name, part in found.parts.items()
    ]
    total = [sum(column) for column in zip(*map(_numbers, found.parts.values()), strict=True)]
    rows.append(["together", *(f"{value:.1f}" for value in total)])
    rates = ", ".join(f"{rate:.2f}/s with {places} at once" for places, rate in found.started_s.items())
    lines = [
        table(["processes", "PSS MB", "processes", "threads", "open files"], rows),
        "",
        f"{found.num} sandboxes; dockerd and containerd grew by {found.grown:.1f} MB each; the kernel charges "
        f"{found.charged:.1f} MB to the two containers of one (pages of files included)",
        f"networks made: {found.networks}; this process: {found.controller_threads:.1f} threads and "
        f"{found.controller_files:.1f} open files for each that it waits for",
        f"started: {rates}; ended: {found.stopped_s:.2f}/s",
    ]
    return "\n".join(lines)


def _numbers(part: Part) -> tuple[float, ...]:
    return part.pss, part.num_processes, part.num_threads, part.num_files
