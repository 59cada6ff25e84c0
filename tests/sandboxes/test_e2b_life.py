"""A hosted sandbox that disappears, or is hard to end: never mistaken for the agent's failure, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import BoxSpec, Command, Limits, Sandbox, SandboxError, SandboxGone
from sandboxes.e2b import E2BBackend
from sandboxes.lifecycle import reap
from tests.sandboxes.e2b_opening import SPEC, open_e2b, records
from tests.sandboxes.e2b_standin import KEY, Standin


@pytest.fixture
async def backend(standin: Standin, tmp_path: Path) -> AsyncIterator[E2BBackend]:
    async with open_e2b(standin, tmp_path, look_s=0.2) as opened:
        yield opened


@pytest.fixture
async def patient(standin: Standin, tmp_path: Path) -> AsyncIterator[E2BBackend]:
    """Does not look on its own whether sandboxes exist."""
    async with open_e2b(standin, tmp_path) as opened:
        yield opened


# --- lifetimes ---


async def test_the_lifetime_covers_the_rollouts_budget(standin: Standin, patient: E2BBackend) -> None:
    async with patient.sandbox(replace(SPEC, limits=Limits(deadline_s=1234.5))):
        assert 1234.5 < standin.running[0].timeouts[0] < 1234.5 + 300


async def test_a_sandbox_in_use_is_extended_also_when_that_fails_at_first(
    standin: Standin, backend: E2BBackend
) -> None:
    async with backend.sandbox(BoxSpec("task")) as box:
        life = standin.running[0]
        ends_at = life.end_at
        standin.fail("timeout", 500, 2)
        result = await box.run(Command(["sleep", "2"]))
        assert result.exit_code == 0
        assert len(life.timeouts) > 1 and life.end_at > ends_at
        assert standin.count("timeout") > len(life.timeouts) - 1  # the failed ones


async def test_a_lifetime_of_the_plan_shorter_than_the_budget_is_extended_while_in_use(
    standin: Standin, tmp_path: Path
) -> None:
    standin.max_lifetime_s, standin.cap_message = 3, "Timeout cannot be greater than 3 seconds"
    standin.total_cap_s = 3600
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(SPEC) as box:
            assert standin.running[0].timeouts == [3]
            assert (await box.run(Command(["sleep", "4"]))).exit_code == 0
            assert len(standin.running[0].timeouts) >= 2


async def test_renewing_gives_the_whole_budget_again(standin: Standin, patient: E2BBackend) -> None:
    async with patient.sandbox(replace(SPEC, limits=Limits(deadline_s=100))) as box:
        await asyncio.sleep(1.2)
        ends_at = standin.running[0].end_at
        await box.renew()
        assert standin.running[0].end_at > ends_at + 1
        standin.end(box.sandbox_id)
        with pytest.raises(SandboxGone):
            await box.renew()


# --- gone ---

CALLS: dict[str, Callable[[Sandbox, Path], Awaitable[object]]] = {
    "run": lambda box, _: box.run(Command(["true"])),
    "run with a time limit": lambda box, _: box.run(Command(["sleep", "60"], timeout_s=5)),
    "job": lambda box, _: box.start_job(Command(["true"])),
    "put_text": lambda box, _: box.put_text("x", "/app/x"),
    "put_dir": lambda box, folder: box.put_dir(folder / "source", "/tests"),
    "get_text": lambda box, _: box.get_text("/etc/passwd"),
    "get_dir": lambda box, folder: box.get_dir("/app", folder / "out"),
    "reset_dir": lambda box, _: box.reset_dir("/logs/verifier"),
    "kill_all": lambda box, _: box.kill_all(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_gone_between_two_calls_is_told_and_remembered(
    standin: Standin, patient: E2BBackend, tmp_path: Path, name: str
) -> None:
    (tmp_path / "source").mkdir()
    async with patient.sandbox(SPEC) as box:
        await box.run(Command(["true"]))
        standin.end(box.sandbox_id)
        with pytest.raises(SandboxGone, match="gone") as raised:
            await CALLS[name](box, tmp_path)
        assert "\n" not in str(raised.value) and "set_timeout" not in str(raised.value)
        num_requests = len(standin.requests)
        for call in CALLS.values():
            with pytest.raises(SandboxGone):
                await call(box, tmp_path)
        assert len(standin.requests) == num_requests  # nobody asks again
    assert standin.count("kill") == 1  # tried all the same
    assert records(tmp_path) == []


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("timeout_s", [None, 30.0])
async def test_gone_while_a_command_runs_is_no_result_and_no_time_out(
    standin: Standin, patient: E2BBackend, timeout_s: float | None, orderly: bool
) -> None:
    async with patient.sandbox(SPEC) as box:
        task = asyncio.create_task(box.run(Command.shell("echo begun; sleep 60", timeout_s=timeout_s)))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        standin.end(box.sandbox_id, orderly=orderly)
        with pytest.raises(SandboxGone):
            await task
        assert time.monotonic() - began < 5


async def test_gone_behind_a_connection_that_hangs_is_noticed(standin: Standin, backend: E2BBackend) -> None:
    async with backend.sandbox(SPEC) as box:
        standin.fail("Start", "hang", 1)
        task = asyncio.create_task(box.run(Command(["true"])))
        await asyncio.sleep(0.1)
        standin.end(box.sandbox_id)
        with pytest.raises(SandboxGone):
            await asyncio.wait_for(task, 5)


async def test_gone_while_a_large_folder_goes_in_is_noticed(
    standin: Standin, backend: E2BBackend, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(b"x" * 3_000_000)
    async with backend.sandbox(SPEC) as box:
        standin.fail("files", "hang", 1)
        task = asyncio.create_task(box.put_dir(tmp_path / "source", "/tests"))
        await asyncio.sleep(0.3)
        standin.end(box.sandbox_id)
        with pytest.raises(SandboxGone):
            await asyncio.wait_for(task, 5)


async def test_gone_during_start_is_an_error_and_leaves_nothing(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("Start", "not-found", 1)
        with pytest.raises(SandboxGone):
            async with backend.sandbox(SPEC):
                pass
    assert standin.running == [] and records(tmp_path) == []


async def test_a_sandbox_that_is_gone_leaves_the_others_alone(standin: Standin, patient: E2BBackend) -> None:
    async with patient.sandbox(SPEC) as doomed, patient.sandbox(SPEC) as other:
        task = asyncio.create_task(other.run(Command.shell("sleep 0.5; echo fine")))
        standin.end(doomed.sandbox_id)
        with pytest.raises(SandboxGone):
            await doomed.run(Command(["true"]))
        assert (await task).stdout == "fine\n"


# --- trouble on the way, the sandbox is fine ---


async def test_a_stream_that_is_cut_is_an_error_of_the_sandbox_not_its_end(
    standin: Standin, patient: E2BBackend
) -> None:
    async with patient.sandbox(SPEC) as box:
        standin.cut_after = 1
        with pytest.raises(SandboxError) as raised:
            await box.run(Command.shell("echo one; sleep 0.2; echo two; sleep 0.2; echo three"))
        assert not isinstance(raised.value, SandboxGone)
        assert (await box.run(Command.shell("echo fine"))).stdout == "fine\n"


@pytest.mark.parametrize("how", [500, 503, "port", "reset"])
async def test_an_answer_of_the_way_in_is_an_error_of_the_sandbox_not_its_end(
    standin: Standin, patient: E2BBackend, how: int | str
) -> None:
    async with patient.sandbox(SPEC) as box:
        standin.fail("Start", how, 1)
        with pytest.raises(SandboxError) as raised:
            await box.run(Command(["true"]))
        assert not isinstance(raised.value, SandboxGone)
        assert (await box.run(Command(["true"]))).exit_code == 0


async def test_a_cut_download_is_an_error_and_nothing_half(
    standin: Standin, patient: E2BBackend, tmp_path: Path
) -> None:
    async with patient.sandbox(SPEC) as box:
        await box.run(Command.shell("head -c 2000000 /dev/urandom > /app/large"))
        task = asyncio.create_task(box.get_dir("/app", tmp_path / "out"))
        standin.cut_after = 20
        with pytest.raises(SandboxError):
            await task
        await box.get_dir("/app", tmp_path / "whole")
    assert (tmp_path / "whole" / "large").stat().st_size == 2_000_000


# --- the end ---


@pytest.mark.parametrize(("how", "times"), [(500, 2), ("reset", 2), (429, 1), (502, 2)])
async def test_a_kill_that_fails_is_tried_again(standin: Standin, tmp_path: Path, how: int | str, times: int) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(SPEC):
            standin.fail("kill", how, times)
        assert standin.running == []
    assert records(tmp_path) == []


async def test_a_kill_that_never_succeeds_is_no_error_and_is_left_on_record(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(SPEC) as box:
            standin.fail("kill", 500, 1000)
        assert len(records(tmp_path)) == 1
        assert box.sandbox_id in caplog.text
    assert len(standin.running) == 1
    standin.forgive()
    monkeypatch.setenv("E2B_API_KEY", KEY)
    assert reap(tmp_path / "owned") == []  # its owner lives


async def test_an_error_inside_still_ends_the_sandbox(standin: Standin, patient: E2BBackend) -> None:
    with pytest.raises(RuntimeError):
        async with patient.sandbox(SPEC):
            raise RuntimeError
    assert standin.running == []


async def test_leaving_the_backend_ends_every_sandbox(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        for _ in range(2):
            await backend.sandbox(SPEC).__aenter__()
        assert len(standin.running) == 2
    assert standin.running == [] and records(tmp_path) == []


async def test_stopping_twice_and_before_the_start_is_fine(standin: Standin, patient: E2BBackend) -> None:
    box = patient.sandbox(SPEC)
    await box.stop()
    async with patient.sandbox(SPEC) as box:
        await box.stop()
        await box.stop()
        with pytest.raises(SandboxGone):
            await box.run(Command(["true"]))


# --- taking over ---


async def test_a_successor_finds_the_job_and_the_settings(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as first:
        box = first.sandbox(BoxSpec("task", env={"COLOUR": "blue"}, workdir="/app/sub", limits=Limits(deadline_s=60)))
        await box.__aenter__()
        job = await box.start_job(Command.shell("sleep 0.3; echo $COLOUR; exit 5"))
        async with open_e2b(standin, tmp_path, run_id="next") as second:
            taken = await second.attach(box.sandbox_id)
            status = await taken.wait_job(job, 10)
            assert (status.exit_code, status.stdout) == (5, "blue\n")
            assert (taken.workdir, taken.user) == (box.workdir, box.user) == ("/app/sub", "user")
            assert (await taken.run(Command.shell("echo $COLOUR; pwd"))).stdout == "blue\n/app/sub\n"
        assert standin.running == []
        with contextlib.suppress(SandboxError):
            await box.stop()
    assert records(tmp_path) == []


async def test_what_does_not_exist_or_is_not_ours_cannot_be_taken_over(standin: Standin, patient: E2BBackend) -> None:
    with pytest.raises(SandboxGone):
        await patient.attach("i0000")
    import e2b

    stranger = await e2b.AsyncSandbox.create(api_key=KEY, api_url=standin.url, sandbox_url=standin.url)
    with pytest.raises(SandboxError, match="not made by"):
        await patient.attach(stranger.sandbox_id)
    assert len(standin.running) == 1
