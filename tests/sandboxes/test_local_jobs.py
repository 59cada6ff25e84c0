"""Detached commands of a local sandbox: output, time limits, ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_boxes import soon

from sandboxes.base import Command, JobStatus, Sandbox, SandboxError
from sandboxes.local_jobs import StreamFile

Left = Callable[[Sandbox], list[str]]


async def run_job(box: Sandbox, script: str, **options: object) -> JobStatus:
    job_id = await box.start_job(Command.shell(script, **options))
    return await box.wait_job(job_id, 20)


async def test_a_job_has_output_exit_code_environment_and_stdin(box: Sandbox) -> None:
    status = await run_job(box, "cat; pwd; echo $GIVEN >&2; exit 3", stdin="given\n", cwd="/logs", env={"GIVEN": "é"})
    assert (status.running, status.exit_code, status.lost, status.timed_out) == (False, 3, False, False)
    assert (status.stdout, status.stderr) == (f"given\n{box.resolve('/logs')}\n", "é\n")
    assert (await run_job(box, "kill -9 $$")).exit_code == 137
    assert (await run_job(box, r"printf 'a\377b'")).stdout == "a\\xffb"


async def test_a_job_goes_on_while_others_run_and_is_seen_at_work(box: Sandbox) -> None:
    job_id = await box.start_job(Command.shell("echo begun; until [ -e go ]; do sleep 0.02; done; echo done"))
    status = await box.wait_job(job_id, 0.2)
    assert status.running and status.exit_code is None
    while (await box.job(job_id)).stdout != "begun\n":
        await asyncio.sleep(0.01)
    assert (await box.run(Command(["touch", "go"]))).exit_code == 0
    assert (await box.wait_job(job_id)).stdout == "begun\ndone\n"


@pytest.mark.parametrize("script", ["sleep 300", "trap '' TERM; setsid sleep 300 & while :; do sleep 0.1; done"])
async def test_a_jobs_time_limit_ends_all_of_it(box: Sandbox, left: Left, script: str) -> None:
    began = time.monotonic()
    status = await run_job(box, f"echo begun; {script}", timeout_s=0.4)
    assert time.monotonic() - began < 6
    assert status.timed_out and not status.running and not status.lost and status.exit_code is None
    assert status.stdout == "begun\n"
    await soon(lambda: left(box) == [])


async def test_a_killed_job_is_lost_and_nothing_of_it_lives(box: Sandbox, left: Left) -> None:
    script = "echo begun; setsid sleep 300 & env -i setsid sleep 300 & sleep 300"
    job_id = await box.start_job(Command.shell(script))
    await soon(lambda: left(box).count("sleep 300") == 3)
    await box.kill_job(job_id)
    status = await box.job(job_id)
    assert status.lost and not status.running and status.exit_code is None and status.stdout == "begun\n"
    assert left(box) == []
    await box.kill_job(job_id)


async def test_kill_all_ends_jobs_too(box: Sandbox, left: Left) -> None:
    jobs = [await box.start_job(Command.shell("setsid sleep 300 & sleep 300")) for _ in range(2)]
    await soon(lambda: left(box).count("sleep 300") == 4)
    await box.kill_all()
    assert [(await box.job(job)).lost for job in jobs] == [True, True]
    assert left(box) == []
    assert (await run_job(box, "exit 4")).exit_code == 4


async def test_a_server_that_a_job_leaves_lives_on(box: Sandbox, left: Left) -> None:
    status = await run_job(box, "(while :; do echo noise; sleep 0.05; done) & echo hi")
    assert status.exit_code == 0 and "hi\n" in status.stdout
    assert await box.run(Command.shell("exit 0"))
    assert len(left(box)) >= 1
    await box.kill_all()
    assert left(box) == []


async def test_long_output_of_a_job_is_capped_and_both_ends_are_kept(box: Sandbox) -> None:
    script = "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo last"
    status = await run_job(box, script, output_cap=10_000)
    assert status.exit_code == 0 and status.truncated and len(status.stdout) < 10_100
    assert status.stdout.startswith("first\nxxx") and status.stdout.endswith("xxx\nlast\n")
    assert "\n[... 19990012 bytes cut ...]\n" in status.stdout


async def test_what_cannot_run_says_so(box: Sandbox) -> None:
    nowhere = await box.wait_job(await box.start_job(Command(["true"], cwd="/gone")), 10)
    assert nowhere.exit_code == 126 and "/gone" in nowhere.stderr
    missing = await box.wait_job(await box.start_job(Command(["no-such-program"])), 10)
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr
    for wrong in ("none", "", "..", "../jobs", "/"):
        with pytest.raises(KeyError):
            await box.job(wrong)
    with pytest.raises(SandboxError, match="cannot run a command as"):
        await box.start_job(Command(["true"], user="daemon"))


async def test_a_job_ends_with_the_deadline_of_the_sandbox(make: Callable[..., Sandbox], left: Left) -> None:
    async with make(deadline_s=0.6) as box:
        job_id = await box.start_job(Command.shell("echo begun; sleep 300"))
        status = await box.wait_job(job_id, 10)
        assert not status.running and status.exit_code is None and (status.timed_out or status.lost)
        await soon(lambda: left(box) == [])


@pytest.mark.parametrize("cap", [0, 1, 5, 100, 200_000])
@pytest.mark.parametrize("chunk", [1, 7, 70_000])
def test_a_stream_on_disk_keeps_its_ends_and_counts_the_middle(tmp_path: Path, cap: int, chunk: int) -> None:
    data = bytes(65 + i % 26 for i in range(300_000 if chunk > 7 else 3_000))
    writer = StreamFile(tmp_path, "s", cap)
    for start in range(0, len(data), chunk):
        writer.append(data[start : start + chunk])
    text, truncated = StreamFile(tmp_path, "s", cap).text()
    assert truncated == (len(data) > cap)
    if truncated:
        head, tail = data[: cap - cap // 2].decode(), data[len(data) - cap // 2 :].decode()
        assert text == f"{head}\n[... {len(data) - cap} bytes cut ...]\n{tail}"
    else:
        assert text == data.decode()
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= cap + 3 * max(cap // 2, 1 << 16)
