"""Limits of one local sandbox: what passes one is ended, and the result says so."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_boxes import backend, soon
from pydantic import ValidationError

from sandboxes.base import BoxSpec, Command, Sandbox, SandboxError, SandboxGone
from sandboxes.local import LocalConfig

Make = Callable[..., Sandbox]
Left = Callable[[Sandbox], list[str]]


async def test_everything_ends_at_the_deadline_and_later_commands_are_refused(make: Make, left: Left) -> None:
    async with make(deadline_s=0.6) as box:
        began = time.monotonic()
        result = await box.run(Command(["sh", "-c", "setsid sleep 300 & echo hi; sleep 300"]))
        assert time.monotonic() - began < 2.6
        assert result.timed_out and result.exit_code is None and result.stdout == "hi\n"
        assert left(box) == []
        with pytest.raises(SandboxError, match="deadline"):
            await box.run(Command(["true"]))


async def test_background_processes_end_at_the_deadline_too(make: Make, left: Left) -> None:
    async with make(deadline_s=0.5) as box:
        await box.run(Command(["sh", "-c", "setsid sleep 300 &"]))
        await soon(lambda: left(box) == ["sleep 300"])
        end = time.monotonic() + 3
        while left(box):
            assert time.monotonic() < end
            await box.get_text("/app/x")


async def test_cpu_seconds_are_limited(make: Make) -> None:
    async with make(cpu_s=1) as box:
        result = await box.run(Command(["sh", "-c", "while :; do :; done"], timeout_s=20))
        assert result.exit_code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL) and not result.timed_out


async def test_file_size_is_limited(make: Make) -> None:
    async with make(file_mb=1) as box:
        result = await box.run(Command(["sh", "-c", "head -c 5000000 /dev/zero > big"]))
        assert result.exit_code != 0
        assert (await box.run(Command(["stat", "-c", "%s", "big"]))).stdout == f"{1 << 20}\n"


HOG = "import os, time\nif os.fork() == 0: os.setsid()\nblock = b'x' * 60_000_000\ntime.sleep(60)"


async def test_memory_of_the_whole_sandbox_is_limited_and_the_sandbox_goes_on(make: Make, left: Left) -> None:
    async with make(memory_mb=100) as box:
        result = await box.run(Command(["python3", "-c", HOG], timeout_s=30))
        assert result.oom and result.exit_code == 128 + signal.SIGKILL and not result.timed_out
        assert "memory limit of 100 MB" in result.stderr
        await soon(lambda: left(box) == [])  # the command's own end may be seen before its child's
        assert (await box.run(Command(["echo", "still here"]))).stdout == "still here\n"


async def test_number_of_processes_is_limited(make: Make) -> None:
    async with make(processes=8) as box:
        result = await box.run(
            Command(["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 60 & done; wait"], timeout_s=30)
        )
        assert result.exit_code == 128 + signal.SIGKILL and not result.oom
        assert "limit of 8 processes" in result.stderr


@pytest.mark.parametrize(
    ("limits", "argv", "said"),
    [
        ({"memory_mb": 100}, ["python3", "-c", HOG], "memory limit of 100 MB"),
        (
            {"processes": 8},
            ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 60 & done; wait"],
            "limit of 8 processes",
        ),
    ],
)
async def test_a_detached_command_that_passes_a_limit_of_the_whole_is_told_so(
    make: Make, left: Left, limits: dict[str, int], argv: list[str], said: str
) -> None:
    async with make(**limits) as box:
        status = await box.wait_job(await box.start_job(Command(argv, timeout_s=30)), 30)
        assert status.lost and status.exit_code is None and not status.timed_out
        assert status.oom is said.startswith("memory") and f"killed at its {said}" in status.stderr
        await soon(lambda: left(box) == [])
        again = await box.wait_job(await box.start_job(Command(["true"])), 20)
        assert (again.exit_code, again.oom, again.stderr) == (0, False, ""), "the one before is not this one's"


async def test_a_huge_address_space_alone_is_no_offence(make: Make) -> None:
    reserve = "import mmap; m = mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | 0x4000); print('reserved')"
    async with make(memory_mb=200) as box:
        assert (await box.run(Command(["python3", "-c", reserve]))).stdout == "reserved\n"


def test_the_sandbox_says_whether_it_is_a_boundary(make: Make, isolation: str) -> None:
    if isolation == "none":
        assert make().description == "local sandbox: no security boundary, the agent runs as you"
    else:
        assert make().description.startswith("local sandbox, sealed by bubblewrap: sees this machine's programs")


async def test_renewing_starts_the_deadline_again(make: Make) -> None:
    async with make(deadline_s=0.8) as box:
        for _ in range(4):
            await asyncio.sleep(0.3)
            await box.renew()
        assert (await box.run(Command(["true"]))).exit_code == 0
        await asyncio.sleep(0.9)
        with pytest.raises(SandboxGone, match="deadline"):
            await box.renew()


@pytest.mark.parametrize(
    "wrong",
    [
        {"limits": {"cpu_s": 0}},
        {"limits": {"cpus": 3}},
        {"rot": "/tmp"},
        {"type": "docker"},
        {"limits": {"file_mb": "x"}},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LocalConfig.model_validate(wrong)


async def test_a_root_that_cannot_be_made_is_a_sandbox_error_and_leaves_no_record(
    isolation: str, tmp_path: Path, registry: Path
) -> None:
    (tmp_path / "file").write_text("")
    box = backend(isolation, tmp_path / "file" / "x", registry).sandbox(BoxSpec("t"))
    with pytest.raises(SandboxError, match="cannot create"):
        await box.__aenter__()
    assert os.listdir(registry) == []
