"""Getting a sandbox from a service that is busy, answers oddly, loses answers or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import BoxSpec, Command, SandboxError, SetupFailed
from tests.sandboxes.e2b_opening import SPEC, open_e2b, records
from tests.sandboxes.e2b_standin import Standin


@pytest.mark.parametrize(
    ("how", "times"),
    [(429, 3), (502, 5), (503, 3), (504, 2), (500, 1), (409, 1), ("reset", 3)],
)
async def test_trouble_that_passes_is_waited_out(standin: Standin, tmp_path: Path, how: int | str, times: int) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", how, times)
        async with backend.sandbox(SPEC) as box:
            assert (await box.run(Command(["true"]))).exit_code == 0
            assert len(standin.running) == 1
    assert standin.count("create") == times + 1
    assert standin.running == [] and records(tmp_path) == []


@pytest.mark.parametrize(("how", "status"), [(429, "429"), (502, "502"), ("reset", ""), ("hang", "")])
async def test_trouble_that_stays_ends_at_the_time_limit(
    standin: Standin, tmp_path: Path, how: int | str, status: str
) -> None:
    began = time.monotonic()
    async with open_e2b(standin, tmp_path, create_timeout_s=1.5) as backend:
        standin.fail("create", how, 10_000)
        with pytest.raises(SandboxError, match=f"made no sandbox.*{status}") as raised:
            async with backend.sandbox(SPEC):
                pass
        assert not isinstance(raised.value, SetupFailed)
        assert time.monotonic() - began < 8
        standin.forgive()
    assert standin.running == [] and records(tmp_path) == []


async def test_the_rollouts_own_deadline_bounds_the_tries(standin: Standin, tmp_path: Path) -> None:
    spec = replace(SPEC, limits=replace(SPEC.limits, deadline_s=1.0))
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", 429, 10_000)
        with pytest.raises(SandboxError, match="in 1 s"):
            async with backend.sandbox(spec):
                pass


async def test_a_wait_that_the_service_asks_for_is_kept(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", 429, 1, headers={"Retry-After": "1"})
        async with backend.sandbox(SPEC):
            pass
    first, second = [when for kind, when in standin.requests if kind == "create"]
    assert second - first >= 1.0


@pytest.mark.parametrize(
    ("status", "message", "error", "says"),
    [
        (400, "template 'nope' has no build", SetupFailed, "task.toml"),
        (403, "no access to template 'nope'", SetupFailed, "task.toml"),
        (404, "template 'nope' not found", SetupFailed, "nope"),
        (400, "invalid network configuration", SandboxError, "invalid network configuration"),
        (402, "team is out of credits", SandboxError, "out of credits"),
        (403, "team is blocked", SandboxError, "team is blocked"),
        (401, "unknown key", SandboxError, "E2B_API_KEY"),
    ],
)
async def test_a_refusal_is_final_and_says_what_to_do(
    standin: Standin, tmp_path: Path, status: int, message: str, error: type[SandboxError], says: str
) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", status, 100, message)
        with pytest.raises(SandboxError, match=says) as raised:
            async with backend.sandbox(BoxSpec("task", image="nope")):
                pass
    assert type(raised.value) is error and "\n" not in str(raised.value)
    assert standin.count("create") == 1 and records(tmp_path) == []


async def test_a_template_that_does_not_exist(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        with pytest.raises(SetupFailed, match="nope"):
            async with backend.sandbox(BoxSpec("task", image="nope")):
                pass
    assert standin.count("create") == 1


@pytest.mark.parametrize(("key", "says"), [(None, "set E2B_API_KEY"), ("e2b_wrong", "401")])
async def test_a_missing_or_wrong_key_is_told_when_the_backend_opens(
    standin: Standin, tmp_path: Path, key: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxError, match=says):
        async with open_e2b(standin, tmp_path, api_key=key):
            pass


async def test_an_unreachable_service_is_told_when_the_backend_opens(standin: Standin, tmp_path: Path) -> None:
    backend = open_e2b(standin, tmp_path)
    standin.stop()
    with pytest.raises(SandboxError, match="E2B"):
        async with backend:
            pass
    with pytest.raises(SandboxError, match="not open"):
        backend.sandbox(SPEC)


# --- answers that are lost ---


async def test_a_sandbox_whose_answer_was_lost_is_found_and_used(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", "lost", 1)
        async with backend.sandbox(SPEC) as box:
            assert [life.sandbox_id for life in standin.running] == [box.sandbox_id]
            assert (await box.run(Command(["true"]))).exit_code == 0
    assert standin.count("create") == 1 and len(standin.lives) == 1
    assert standin.running == [] and records(tmp_path) == []


async def test_a_sandbox_that_appears_after_its_request_was_given_up_is_ended(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", "late", 1, delay_s=0.4)
        async with backend.sandbox(SPEC) as box:
            while len(standin.lives) < 2:
                await asyncio.sleep(0.02)
            assert (await box.run(Command(["true"]))).exit_code == 0
    assert standin.running == [] and records(tmp_path) == []


async def test_a_sandbox_that_appears_after_everything_failed_is_ended_with_the_run(
    standin: Standin, tmp_path: Path
) -> None:
    async with open_e2b(standin, tmp_path, create_timeout_s=0.3) as backend:
        standin.fail("create", "late", 1, delay_s=1.0)
        standin.fail("create", 429, 1000)
        with pytest.raises(SandboxError):
            async with backend.sandbox(SPEC):
                pass
        while not standin.running:
            await asyncio.sleep(0.02)
    assert standin.running == []


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 0.21, 0.25, 0.3, 0.35])
async def test_a_start_that_is_cancelled_leaves_nothing(standin: Standin, tmp_path: Path, after_s: float) -> None:
    standin.create_delay_s = 0.2
    async with open_e2b(standin, tmp_path) as backend:
        box = backend.sandbox(SPEC)
        task = asyncio.create_task(box.__aenter__())
        await asyncio.sleep(after_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task  # it may have been ready
            await box.stop()
        while standin.in_flight:  # what the service was still making
            await asyncio.sleep(0.02)
    assert standin.running == [] and records(tmp_path) == []


# --- the plan's longest lifetime ---


@pytest.mark.parametrize(
    ("cap_s", "message", "lifetime_s"),
    [
        (3600, "Timeout cannot be greater than 1 hours", 3600),
        (5400, "Timeout cannot be greater than 90 minutes", 5400),
        (400, "timeout cannot be greater than 400 seconds", 400),
        (3600, "the timeout is too long for your plan", 3600),
        (1000, "timeout: invalid", 600),
    ],
)
async def test_a_lifetime_above_the_plans_is_cut_and_remembered(
    standin: Standin, tmp_path: Path, cap_s: int, message: str, lifetime_s: int
) -> None:
    standin.max_lifetime_s, standin.cap_message = cap_s, message
    spec = replace(SPEC, limits=replace(SPEC.limits, deadline_s=50_000.0))
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(spec):
            assert standin.running[0].timeouts == [lifetime_s]
        refused = standin.count("create")
        assert refused > 1
        async with backend.sandbox(spec):
            assert standin.count("create") == refused + 1


# --- readiness ---


@pytest.mark.parametrize("how", ["not-found", "port", "reset", 503])
async def test_a_sandbox_that_does_not_answer_yet_is_waited_for(
    standin: Standin, tmp_path: Path, how: int | str
) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("health", how, 4)
        async with backend.sandbox(SPEC) as box:
            assert (await box.run(Command(["true"]))).exit_code == 0
    assert standin.count("create") == 1


async def test_a_sandbox_that_never_answers_is_ended(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path, create_timeout_s=1.0) as backend:
        standin.fail("health", "port", 10_000)
        with pytest.raises(SandboxError, match="never answered"):
            async with backend.sandbox(SPEC):
                pass
        assert standin.running == []
    assert records(tmp_path) == []


async def test_a_template_with_an_old_daemon_is_refused(standin: Standin, tmp_path: Path) -> None:
    standin.envd_version = "0.4.2"
    async with open_e2b(standin, tmp_path) as backend:
        with pytest.raises(SetupFailed, match="build it again"):
            async with backend.sandbox(SPEC):
                pass
    assert standin.running == [] and records(tmp_path) == []


# --- many at once ---


async def test_creations_at_the_same_time_are_bounded(standin: Standin, tmp_path: Path) -> None:
    standin.create_delay_s = 0.05
    async with open_e2b(standin, tmp_path, max_creating=2) as backend:
        standin.fail("create", 429, 3)

        async def one() -> None:
            async with backend.sandbox(SPEC) as box:
                assert (await box.run(Command(["true"]))).exit_code == 0

        await asyncio.gather(*(one() for _ in range(6)))
    assert standin.max_in_flight == 2
    assert len(standin.lives) == 6 and standin.running == [] and records(tmp_path) == []


async def test_one_failure_leaves_its_siblings_alone(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:

        async def one(image: str) -> int | None:
            async with backend.sandbox(BoxSpec("task", image=image)) as box:
                return (await box.run(Command.shell("sleep 0.3; exit 7"))).exit_code

        results = await asyncio.gather(one("base"), one("nope"), one("base"), return_exceptions=True)
    assert results[0] == results[2] == 7 and isinstance(results[1], SetupFailed)
