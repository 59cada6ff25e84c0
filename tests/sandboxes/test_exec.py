"""What running a command does: time limits, background children, output, environment."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import pytest
from local_boxes import soon

from sandboxes.base import Command, RunResult, Sandbox, SandboxError, SandboxGone

Left = Callable[[Sandbox], list[str]]


async def sh(box: Sandbox, script: str, **options: object) -> RunResult:
    return await box.run(Command(["sh", "-c", script], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "script",
    [
        "echo begun; sleep 300",
        "echo begun; while :; do :; done",
        "echo begun; trap '' TERM INT HUP; while :; do sleep 0.1; done",
        "echo begun; setsid sleep 300 & wait",
        "echo begun; (setsid sh -c 'trap \"\" TERM; sleep 300; sleep 300' &) ; sleep 300",
        "echo begun; env -i setsid sleep 300 & wait",
        "echo begun; yes",
    ],
)
async def test_time_out_returns_soon_keeps_output_and_leaves_no_process(box: Sandbox, left: Left, script: str) -> None:
    began = time.monotonic()
    result = await sh(box, script, timeout_s=0.4)
    assert time.monotonic() - began < 2.4
    assert result.timed_out and result.exit_code is None
    assert result.stdout.startswith("begun\n")
    assert left(box) == []


async def test_a_command_that_starts_a_server_returns_at_once_and_the_server_lives(box: Sandbox, left: Left) -> None:
    began = time.monotonic()
    result = await sh(box, "sleep 600 & echo hi; echo $! > pid", timeout_s=5)
    assert time.monotonic() - began < 1
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "hi\n", False)
    assert (await sh(box, "kill -0 $(cat pid)")).exit_code == 0
    await sh(box, "sleep 300", timeout_s=0.1)  # another command's time-out is not the server's
    assert (await sh(box, "kill -0 $(cat pid)")).exit_code == 0
    await soon(lambda: left(box) == ["sleep 600"])
    await box.kill_all()
    assert left(box) == []


async def test_a_background_writer_survives_the_end_of_its_command(box: Sandbox) -> None:
    await sh(box, "(trap '' HUP; while echo noise; do sleep 0.01; done; echo broke > broke) & echo hi")
    await asyncio.sleep(0.2)  # it writes on meanwhile, past the end of its command
    assert await box.get_text("/app/broke") is None


async def test_long_output_is_capped_with_a_marker_and_both_ends_are_kept(box: Sandbox) -> None:
    result = await sh(box, "echo first; head -c 52428800 /dev/zero | tr '\\0' x; echo; echo last", output_cap=10_000)
    assert result.exit_code == 0 and result.truncated
    assert len(result.stdout) < 10_100
    assert result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxx\nlast\n")
    assert "\n[... 52418812 bytes cut ...]\n" in result.stdout


async def test_output_at_the_cap_is_not_marked(box: Sandbox) -> None:
    result = await sh(box, "printf 12345; printf 123456 >&2", output_cap=5)
    assert result.stdout == "12345"
    assert result.truncated and "[... 1 bytes cut ...]" in result.stderr


async def test_undecodable_output_is_escaped(box: Sandbox) -> None:
    assert (await sh(box, r"printf 'a\377b'")).stdout == "a\\xffb"


async def test_nothing_of_the_parents_environment_is_visible(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    result = await box.run(Command(["env"], env={"GIVEN": "1"}))
    names = {line.partition("=")[0] for line in result.stdout.splitlines()}
    allowed = {"PATH", "HOME", "TMPDIR", "LANG", "SANDBOX_ROOT", "GIVEN", "HARNESS_TRAINER_OWNED", "PWD"}
    assert "GIVEN" in names and names <= allowed | {"OLDPWD", "SHLVL", "_"}
    assert "hunter2" not in result.stdout
    assert "hunter2" not in (await sh(box, "cat /proc/[0-9]*/environ")).stdout or not box.description.count("sealed")


async def test_the_marker_cannot_be_taken_away_by_the_callers_environment(box: Sandbox, left: Left) -> None:
    await sh(box, "setsid sleep 300 &", env={"HARNESS_TRAINER_OWNED": "nobody"})
    await soon(lambda: left(box) == ["sleep 300"])


async def test_relative_path_entries_do_not_let_the_workspace_choose_programs(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f".::{os.environ['PATH']}")
    await box.put_text("#!/bin/sh\necho planted\n", "/app/ls", 0o755)
    assert "planted" not in (await box.run(Command(["ls"]))).stdout


async def test_home_and_temp_folder_are_inside(box: Sandbox) -> None:
    root = box.resolve("/").rstrip("/")
    assert (await sh(box, 'echo "$HOME $TMPDIR $SANDBOX_ROOT $PWD"')).stdout == (
        f"{root}/home {root}/tmp {root} {root}/app\n"
    )


async def test_stdin_is_given_whole_or_empty(box: Sandbox) -> None:
    big = "line\n" * 200_000
    assert (await box.run(Command(["wc", "-l"], stdin=big))).stdout.strip() == "200000"
    assert (await box.run(Command(["wc", "-c"]))).stdout.strip() == "0"


async def test_failures_of_a_command_are_results(box: Sandbox) -> None:
    assert (await sh(box, "exit 7")).exit_code == 7
    assert (await sh(box, "kill -9 $$")).exit_code == 137
    missing = await box.run(Command(["no-such-program"]))
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr
    no_folder = await box.run(Command(["true"], cwd="/gone"))
    assert no_folder.exit_code == 126 and "/gone" in no_folder.stderr


async def test_arguments_arrive_untouched(box: Sandbox) -> None:
    odd = ["a b", "$HOME", "'", '"', "", "*", "-n", "new\nline"]
    result = await box.run(Command(["python3", "-c", "import sys; print(sys.argv[1:])", *odd]))
    assert result.stdout.strip() == repr(odd)


async def test_an_argument_list_that_is_too_long_is_an_error_that_says_so(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="too long"):
        await box.run(Command(["true", "x" * 4_000_000]))


async def test_cancelling_a_command_ends_its_processes(box: Sandbox, left: Left) -> None:
    task = asyncio.create_task(sh(box, "setsid sleep 300 & touch begun; sleep 300"))
    while await box.get_text("/app/begun") is None:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(box) == []


async def test_a_stopped_sandbox_is_gone(make: Callable[..., Sandbox]) -> None:
    box = make()
    with pytest.raises(SandboxError, match="not started"):
        await box.run(Command(["true"]))
    async with box:
        task = asyncio.create_task(sh(box, "touch begun; sleep 300"))
        while await box.get_text("/app/begun") is None:
            await asyncio.sleep(0.01)
        await box.stop()
        with pytest.raises(SandboxGone, match="gone"):
            await task
        with pytest.raises(SandboxGone, match="gone"):
            await box.run(Command(["true"]))
        await box.stop()


async def test_what_a_command_hides_from_its_time_out_is_found(box: Sandbox, left: Left) -> None:
    if "sealed" not in box.description:
        pytest.skip("only a sealed sandbox can do this")
    hidden = "env -i setsid sh -c '(cd /; env -i setsid sleep 300 &) ; exit' & "
    result = await sh(box, f"{hidden} sleep 300", timeout_s=0.5)
    assert result.timed_out and left(box) == []


async def test_commands_at_the_same_time_do_not_mix(box: Sandbox) -> None:
    results = await asyncio.gather(*(sh(box, f"echo {i}; exit {i}") for i in range(12)))
    assert [(r.exit_code, r.stdout) for r in results] == [(i, f"{i}\n") for i in range(12)]


async def test_only_its_own_user_can_run_commands(box: Sandbox) -> None:
    assert (await box.run(Command(["true"], user=box.user))).exit_code == 0
    assert (await sh(box, "id -un")).stdout.strip() == box.user
    with pytest.raises(SandboxError, match="cannot run a command as daemon"):
        await box.run(Command(["true"], user="daemon"))
