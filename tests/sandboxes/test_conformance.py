"""Every promise of `sandboxes.base`, on every backend. The table at the end of the session is made from these tests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from backends import OPENERS, Place

from sandboxes.base import (
    FOLDERS,
    Backend,
    BoxSpec,
    Command,
    Healthcheck,
    Limits,
    NoSuchPath,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxGone,
    SetupFailed,
    TooLarge,
)
from sandboxes.ownership import Keeper, Owner

Start = Callable[..., Awaitable[Sandbox]]
SLACK_S = 2.0  # over a time limit


@pytest.fixture(params=list(OPENERS))
async def backend(request: pytest.FixtureRequest, tmp_path: Path, registry: Path) -> AsyncIterator[Backend]:
    if request.param == "harbor" and not os.environ.get("HARNESS_TRAINER_ALL_BACKENDS"):
        pytest.skip("each command through Harbor takes half a second: set HARNESS_TRAINER_ALL_BACKENDS=1")
    place = Place(tmp_path, registry, request)
    async with OPENERS[request.param](place) as opened:
        yield opened


@pytest.fixture
async def start(backend: Backend) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(**fields: object) -> Sandbox:
            return await stack.enter_async_context(backend.sandbox(BoxSpec("conformance", **fields)))  # type: ignore[arg-type]

        yield start


@pytest.fixture
async def box(start: Start) -> Sandbox:
    return await start()


async def sh(box: Sandbox, script: str, **options: object) -> RunResult:
    return await box.run(Command.shell(script, **options))


async def alive(box: Sandbox, name: str) -> bool:
    """Whether the process runs that wrote its id to /tmp/<name>."""
    pid = (await box.get_text(f"/tmp/{name}") or "").strip()
    script = f'read -r line < /proc/{pid or 0}/stat 2>/dev/null && case ${{line##*)}} in " Z"*) exit 1 ;; esac'
    return (await sh(box, script)).exit_code == 0


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


# --- time limits and background children -------------------------------------------------------------------------

STUBBORN = {
    "sleeper": "sleep 300",
    "spinner": "while :; do :; done",
    "deaf": "trap '' TERM INT HUP; while :; do sleep 0.1; done",
    "deaf spinner": "trap '' TERM INT HUP; while :; do :; done",
    "new session": "setsid sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 300' & wait",
    "deaf new session": "cd $SANDBOX_ROOT/tmp; "
    "(setsid sh -c 'trap \"\" TERM; echo $$ > child; : tmp/child; sleep 300; sleep 300' &); sleep 300",
    "clean environment": 'env -i setsid sh -c "echo \\$\\$ > $SANDBOX_ROOT/tmp/child; exec sleep 300" & wait',
    "orphan": "(sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 300' &); sleep 300",
    "writer": "yes",
    "stopped": "kill -STOP $$",
    "closed streams": "exec >&- 2>&-; sleep 300",
    "forker": "while :; do sleep 300 & sleep 0.02; done",
}


@pytest.mark.parametrize("script", STUBBORN.values(), ids=STUBBORN)
async def test_time_limit_ends_everything_soon_and_keeps_the_output(box: Sandbox, script: str) -> None:
    began = time.monotonic()
    result = await sh(
        box, f"echo begun; echo $$ > $SANDBOX_ROOT/tmp/main; echo x > $SANDBOX_ROOT/tmp/child\n{script}", timeout_s=1.0
    )
    took = time.monotonic() - began
    assert took < 1.0 + SLACK_S
    assert result.timed_out and result.exit_code is None
    assert result.stdout.startswith("begun\n")
    assert not await alive(box, "main")
    if "tmp/child" in script:
        assert (await box.get_text("/tmp/child") or "x") != "x\n"
        assert not await alive(box, "child")


async def test_time_limit_of_a_command_leaves_other_commands_and_their_servers(box: Sandbox) -> None:
    await sh(box, "(sh -c 'echo $$ > $SANDBOX_ROOT/tmp/server; exec sleep 300' &)")
    other = asyncio.create_task(sh(box, "sleep 1.5; echo done"))
    assert (await sh(box, "sleep 300", timeout_s=0.3)).timed_out
    assert await alive(box, "server")
    assert (await other).stdout == "done\n"


@pytest.mark.parametrize(
    "script",
    [
        "sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 600' & echo hi",
        "nohup sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec tail -f /dev/null' & echo hi",
        "setsid sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 600' & echo hi",
        "(sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 600' &); echo hi",
    ],
)
async def test_a_command_that_starts_a_server_returns_at_once_and_the_server_lives(box: Sandbox, script: str) -> None:
    began = time.monotonic()
    result = await sh(box, script, timeout_s=20)
    assert time.monotonic() - began < 3
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.stdout.endswith("hi\n")
    await until(lambda: _written(box, "/tmp/child"))
    assert await alive(box, "child")


async def _written(box: Sandbox, path: str) -> bool:
    return bool(await box.get_text(path))


async def test_a_background_writer_lives_on_after_its_command(box: Sandbox) -> None:
    script = "(while echo noise && echo more >&2; do echo tick >> $SANDBOX_ROOT/tmp/ticks; sleep 0.05; done) & echo hi"
    assert (await sh(box, script)).exit_code == 0
    await asyncio.sleep(1.5)
    before = len(await box.get_text("/tmp/ticks") or "")
    await until(lambda: _longer(box, before))


async def _longer(box: Sandbox, size: int) -> bool:
    return len(await box.get_text("/tmp/ticks") or "") > size


async def test_cancelling_a_command_ends_its_processes(box: Sandbox) -> None:
    task = asyncio.create_task(sh(box, "setsid sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 300' & sleep 300"))
    await until(lambda: _written(box, "/tmp/child"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await alive(box, "child")


# --- output ------------------------------------------------------------------------------------------------------


async def test_long_output_is_capped_while_it_streams(box: Sandbox) -> None:
    began = time.monotonic()
    result = await sh(box, "echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert time.monotonic() - began < 60
    assert result.exit_code == 0 and result.truncated
    assert len(result.stdout) < 4_000_100
    assert result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxx\nlast\n")
    assert "\n[... 196000012 bytes cut ...]\n" in result.stdout


async def test_output_at_the_cap_is_not_marked_and_streams_are_apart(box: Sandbox) -> None:
    result = await sh(box, "printf 12345; printf 123456 >&2", output_cap=5)
    assert result.stdout == "12345"
    assert result.truncated and "[... 1 bytes cut ...]" in result.stderr


async def test_undecodable_output_is_escaped_and_zero_bytes_pass(box: Sandbox) -> None:
    assert (await sh(box, r"printf 'a\377b\000c'")).stdout == "a\\xffb\0c"


async def test_output_without_a_last_newline_and_no_output_are_exact(box: Sandbox) -> None:
    result = await sh(box, "printf 'no newline'; printf '\\n\\n' >&2")
    assert (result.stdout, result.stderr) == ("no newline", "\n\n")
    empty = await box.run(Command(["true"]))
    assert (empty.exit_code, empty.stdout, empty.stderr, empty.truncated) == (0, "", "", False)


# --- what a command is given -------------------------------------------------------------------------------------

ODD = ["a b", "$HOME", "'", '"', "", "*", "-n", "--", "new\nline", "tab\t", "\\", "ünïcode ☃", "a=b", "trailing\n"]


async def test_arguments_arrive_untouched(box: Sandbox) -> None:
    result = await box.run(Command(["printf", "[%s]\\0", *ODD]))
    assert result.stdout == "".join(f"[{argument}]\0" for argument in ODD)


async def test_environment_arrives_untouched(box: Sandbox) -> None:
    env = {f"V{number}": value for number, value in enumerate(ODD)} | {"odd-name.x": "1"}
    result = await box.run(Command(["env", "-0"], env=env))
    seen = dict(line.split("=", 1) for line in result.stdout.split("\0") if "=" in line)
    assert {name: seen.get(name) for name in env} == env


async def test_nothing_of_the_parents_environment_is_visible(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert "hunter2" not in (await box.run(Command(["env"]))).stdout
    assert "SECRET_TOKEN" not in (await sh(box, "cat /proc/self/environ")).stdout


async def test_the_specs_environment_reaches_every_command_and_the_commands_own_wins(start: Start) -> None:
    box = await start(env={"GIVEN": "spec", "OTHER": "spec"})
    assert (await sh(box, 'echo "$GIVEN $OTHER"', env={"OTHER": "own"})).stdout == "spec own\n"


async def test_root_of_the_sandbox_is_told(box: Sandbox) -> None:
    await box.put_text("here", "/tmp/told")
    assert (await sh(box, 'cat "${SANDBOX_ROOT:-}/tmp/told"; echo ${SANDBOX_ROOT-unset}')).stdout.startswith("here")
    assert (await box.run(Command(["cat", box.resolve("/tmp/told")]))).stdout == "here"


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_stdin_is_given_whole(box: Sandbox, size: int) -> None:
    text = "l\n" * (size // 2) + "x" * (size % 2)
    assert (await box.run(Command(["wc", "-c"], stdin=text))).stdout.strip() == str(size)


async def test_stdin_that_nobody_reads_or_that_comes_back_does_not_block(box: Sandbox) -> None:
    assert (await box.run(Command(["true"], stdin="x" * 3_000_000, timeout_s=20))).exit_code == 0
    echoed = await box.run(Command(["cat"], stdin="y" * 3_000_000, timeout_s=20))
    assert echoed.stdout == "y" * 3_000_000


async def test_no_stdin_is_an_empty_one(box: Sandbox) -> None:
    assert (await box.run(Command(["wc", "-c"], timeout_s=20))).stdout.strip() == "0"


async def test_a_command_runs_in_its_folder(box: Sandbox) -> None:
    await sh(box, 'mkdir -p "/tmp/a b/ü" 2>/dev/null || mkdir -p "$SANDBOX_ROOT/tmp/a b/ü"')
    await box.put_text("found", "/tmp/a b/ü/file")
    assert (await box.run(Command(["cat", "file"], cwd="/tmp/a b/ü"))).stdout == "found"
    await box.put_text("default", f"{box.workdir}/file")
    assert (await box.run(Command(["cat", "file"]))).stdout == "default"


async def test_failures_of_a_command_are_results(box: Sandbox) -> None:
    assert (await sh(box, "exit 7")).exit_code == 7
    assert (await sh(box, "kill -9 $$")).exit_code == 137
    assert (await sh(box, "kill -TERM $$")).exit_code == 143
    missing = await box.run(Command(["no-such-program"]))
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr
    await box.put_text("#!/bin/sh\n", "/tmp/no-permission", 0o644)
    refused = await box.run(Command([box.resolve("/tmp/no-permission")]))
    assert refused.exit_code == 126
    for folder in ("/gone", "/tmp/no-permission"):
        no_folder = await box.run(Command(["true"], cwd=folder))
        assert no_folder.exit_code == 126 and folder in no_folder.stderr


@pytest.mark.parametrize("builtin", ["cd", "exit", "exec", ".", "trap"])
async def test_a_shell_builtin_is_no_program(box: Sandbox, builtin: str) -> None:
    assert (await box.run(Command([builtin, "/"]))).exit_code in (126, 127)


async def test_an_impossible_command_is_refused_with_a_message(box: Sandbox) -> None:
    with pytest.raises(ValueError, match="name"):
        await box.run(Command([]))
    with pytest.raises(SandboxError):
        await box.run(Command(["echo", "zero\0byte"]))
    assert (await box.run(Command(["true"]))).exit_code == 0


async def test_many_commands_at_once_keep_their_output_apart(box: Sandbox) -> None:
    results = await asyncio.gather(*(sh(box, f"echo {n}; echo {n} >&2; exit {n}") for n in range(8)))
    assert [(r.exit_code, r.stdout, r.stderr) for r in results] == [(n, f"{n}\n", f"{n}\n") for n in range(8)]


async def test_commands_never_block_the_event_loop(box: Sandbox) -> None:
    gaps = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(sh(box, "sleep 3") for _ in range(4)))
    watcher.cancel()
    assert max(gaps) < 1.5  # the machine may be busy; a blocked loop would wait as long as the command


# --- users -------------------------------------------------------------------------------------------------------


async def test_commands_run_as_who_the_sandbox_says(box: Sandbox) -> None:
    uid = (await box.run(Command(["id", "-u"]))).stdout.strip()
    name = (await sh(box, "id -un 2>/dev/null")).stdout.strip()
    assert box.user in (None, uid, name) and (box.user == "root") == (uid == "0" and box.user is not None)


async def test_another_user_can_run_a_command_where_that_is_promised(backend: Backend, box: Sandbox) -> None:
    if not backend.traits.users:
        pytest.skip("this backend has one user")
    for user, uid in (("root", "0"), ("0", "0"), ("1234", "1234"), ("nobody", "65534")):
        result = await box.run(Command.shell("id -u; id -g", user=user))
        assert result.stdout.split() == [uid, uid], user
    with pytest.raises(SandboxError):
        result = await box.run(Command(["true"], user="nobody-has-this-name"))
        assert result.exit_code != 0, "it ran as somebody"
        raise SandboxError("it could not run")


async def test_time_limit_reaches_another_users_processes(backend: Backend, box: Sandbox) -> None:
    if not backend.traits.users:
        pytest.skip("this backend has one user")
    script = "echo $$ > /tmp/main; chmod 666 /tmp/main; trap '' TERM; while :; do sleep 0.1; done"
    assert (await sh(box, script, user="1234", timeout_s=1.0)).timed_out
    assert not await alive(box, "main")


async def test_the_specs_user_runs_commands_and_owns_what_is_put(backend: Backend, start: Start) -> None:
    if not backend.traits.users:
        pytest.skip("this backend has one user")
    for user, uid in (("root", "0"), ("nobody", "65534"), ("4321", "4321")):
        box = await start(user=user)
        assert box.user == user
        await box.put_text("x", "/app/new/file")
        script = "id -u; stat -c %u /app/new/file /app/new; touch /app/mine && echo ok"
        assert (await sh(box, script)).stdout.split() == [uid, uid, uid, "ok"]


# --- folders and files -------------------------------------------------------------------------------------------


async def test_the_folders_are_there_and_writable(box: Sandbox) -> None:
    for folder in FOLDERS:
        result = await sh(box, f'touch "${{SANDBOX_ROOT:-}}{folder}/x" && echo ok')
        assert result.stdout == "ok\n", (folder, result.stderr)


@pytest.mark.parametrize(
    "text", ["", "plain\n", "no newline", "ünïcode ☃\n", "zero\0byte", "\\n$HOME'\"`\n", "x" * 300_000]
)
async def test_text_comes_back_as_it_went(box: Sandbox, text: str) -> None:
    await box.put_text(text, "/app/deep/er/file name")
    assert await box.get_text("/app/deep/er/file name") == text


@pytest.mark.parametrize("name", ["-rf", "a b", "new\nline", "'", "$(id)", "ü", "*", "..."])
async def test_odd_file_names_work(box: Sandbox, name: str) -> None:
    await box.put_text("odd", f"/app/{name}/{name}")
    assert await box.get_text(f"/app/{name}/{name}") == "odd"
    await box.reset_dir(f"/app/{name}")
    assert await box.get_text(f"/app/{name}/{name}") is None


async def test_permissions_of_a_text_are_as_asked(box: Sandbox) -> None:
    await box.put_text("#!/bin/sh\necho ran\n", "/app/script", 0o755)
    assert (await box.run(Command([box.resolve("/app/script")]))).stdout == "ran\n"
    assert (await sh(box, 'stat -c %a "$SANDBOX_ROOT/app/script"')).stdout == "755\n"


async def test_get_text_reads_at_most_the_cap(box: Sandbox) -> None:
    await box.put_text("0123456789", "/app/file")
    assert await box.get_text("/app/file", cap=4) == "0123"
    assert await box.get_text("/app/file", cap=10) == "0123456789"


NO_FILES = {
    "missing": "true",
    "folder": "mkdir $f",
    "link": "echo secret > $SANDBOX_ROOT/tmp/real; ln -s $SANDBOX_ROOT/tmp/real $f",
    "dangling link": "ln -s /nowhere $f",
    "fifo": "mkfifo $f",
    "fifo with a writer": "mkfifo $f; (exec sleep 60 > $f) & true",
    "socket": 'python3 -c "import socket,sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])" $f',
    "device by a link": "ln -s /dev/zero $f",
}


@pytest.mark.parametrize("script", NO_FILES.values(), ids=NO_FILES)
async def test_only_a_regular_file_has_text_and_nothing_hangs(box: Sandbox, script: str) -> None:
    await sh(box, f'f="$SANDBOX_ROOT/app/it"; {script}')
    began = time.monotonic()
    assert await box.get_text("/app/it") is None
    with pytest.raises(NoSuchPath):
        await box.get_file("/app/it", Path(os.devnull).with_name("never-written"))
    assert time.monotonic() - began < 5


async def test_no_parent_that_is_a_link_is_followed_when_reading(box: Sandbox, tmp_path: Path) -> None:
    await sh(
        box,
        "cd $SANDBOX_ROOT/tmp; mkdir real; echo secret > real/f; ln -s $SANDBOX_ROOT/tmp/real $SANDBOX_ROOT/app/l",
    )
    assert await box.get_text("/tmp/real/f") == "secret\n"
    assert await box.get_text("/app/l/f") is None
    with pytest.raises(NoSuchPath):
        await box.get_file("/app/l/f", tmp_path / "f")
    for path in ("/app/l", "/app/l/../l"):
        with pytest.raises(NoSuchPath):
            await box.get_dir(path, tmp_path / "d")


@pytest.mark.parametrize("how", ["file", "parent", "folder"])
async def test_writing_replaces_links_and_never_follows_them(box: Sandbox, tmp_path: Path, how: str) -> None:
    await sh(box, "mkdir $SANDBOX_ROOT/tmp/real; echo kept > $SANDBOX_ROOT/tmp/real/f")
    script = {
        "file": "mkdir $SANDBOX_ROOT/app/d; ln -s $SANDBOX_ROOT/tmp/real/f $SANDBOX_ROOT/app/d/f",
        "parent": "ln -s $SANDBOX_ROOT/tmp/real $SANDBOX_ROOT/app/d",
        "folder": "mkdir -p $SANDBOX_ROOT/app/d; ln -s $SANDBOX_ROOT/tmp/real $SANDBOX_ROOT/app/d/f",
    }[how]
    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_text("dir")
    for put, text in (("text", "text"), ("file", "dir"), ("dir", "dir")):
        await sh(box, f"rm -rf $SANDBOX_ROOT/app/d; {script}")
        if put == "text":
            await box.put_text("text", "/app/d/f")
        elif put == "file":
            await box.put_file(source / "f", "/app/d/f")
        else:
            await box.put_dir(source, "/app/d")
        assert await box.get_text("/app/d/f") == text
        assert await box.get_text("/tmp/real/f") == "kept\n"


async def test_a_folder_goes_in_and_comes_out_the_same(box: Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o750)
    (source / "sub" / "big").write_bytes(os.urandom(3_000_000))
    (source / "sub" / "read-only").write_text("r")
    (source / "sub" / "read-only").chmod(0o444)
    (source / "sub" / "link").symlink_to("../run.sh")
    (source / "ünï ☃").write_text("name")
    await box.put_dir(source, "/app/in")
    assert (await box.run(Command([box.resolve("/app/in/sub/link")]))).stdout == "ran\n"
    assert (await sh(box, 'touch "$SANDBOX_ROOT/app/in/new" && echo ok')).stdout == "ok\n"
    assert await box.get_dir("/app/in", back) == ()
    (back / "new").unlink()
    assert _described(back) == _described(source)


def _described(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes() if path.is_file() else None)
    return found


async def test_a_large_file_goes_in_and_comes_out(box: Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "big", tmp_path / "back"
    source.write_bytes(os.urandom(5_000_001))
    source.chmod(0o640)
    await box.put_file(source, "/app/deep/big")
    await box.get_file("/app/deep/big", back)
    assert back.read_bytes() == source.read_bytes() and back.stat().st_mode & 0o777 == 0o640
    with pytest.raises(TooLarge):
        await box.get_file("/app/deep/big", tmp_path / "no", cap=5_000_000)
    with pytest.raises(TooLarge):
        await box.get_dir("/app/deep", tmp_path / "no2", cap=5_000_000)


@pytest.mark.parametrize("kind", ["climbing link", "absolute link", "fifo", "missing"])
async def test_what_must_not_go_in_is_refused(box: Sandbox, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind != "missing":
        source.mkdir()
        (tmp_path / "secret").write_text("secret")
        if kind == "fifo":
            os.mkfifo(source / "fifo")
        else:
            (source / "link").symlink_to("../secret" if kind == "climbing link" else tmp_path / "secret")
    with pytest.raises(SandboxError):
        await box.put_dir(source, "/app/in")


async def test_what_comes_out_stays_in_its_folder(box: Sandbox, tmp_path: Path) -> None:
    await sh(
        box,
        'mkdir "$SANDBOX_ROOT/app/d"; cd "$SANDBOX_ROOT/app/d"; echo fine > fine; ln -s fine good; ln fine hard; '
        "ln -s ../../../../etc/passwd climbs; ln -s /etc/passwd absolute; mkfifo fifo; "
        "mkdir sub; ln -s .. sub/up; ln -s sub/up/.. out",
    )
    left_out = await box.get_dir("/app/d", tmp_path / "back")
    assert {entry.name for entry in left_out} == {"climbs", "absolute", "fifo", "out"}
    assert {entry.name: entry.link for entry in left_out}["absolute"] == "/etc/passwd"
    back = tmp_path / "back"
    assert (back / "good").read_text() == (back / "hard").read_text() == "fine\n"
    assert sorted(p.name for p in back.iterdir()) == ["fine", "good", "hard", "sub"]


async def test_getting_what_is_no_folder_is_an_error(box: Sandbox, tmp_path: Path) -> None:
    await box.put_text("x", "/app/file")
    for path in ("/app/file", "/app/missing", "/app/file/below"):
        with pytest.raises(NoSuchPath):
            await box.get_dir(path, tmp_path / "d")


@pytest.mark.parametrize("path", ["relative", "", "app/x"])
async def test_a_path_is_absolute(box: Sandbox, path: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        await box.put_text("x", path)
    with pytest.raises(ValueError, match="absolute"):
        box.resolve(path)


@pytest.mark.parametrize(
    "script",
    [
        "true",
        "echo x > $d",
        "ln -s $SANDBOX_ROOT/tmp/real $d",
        "mkdir $d; echo x > $d/old; chmod 000 $d",
        "mkdir -p $d/a/b/c; touch $d/a/b/c/x; chmod 555 $d/a/b/c $d/a/b $d/a $d",
        "mkdir $d; i=0; cd $d; while [ $i -lt 300 ]; do mkdir -p x && cd x; i=$((i+1)); done",
    ],
)
async def test_reset_gives_an_empty_folder_of_our_own(box: Sandbox, script: str) -> None:
    await sh(box, "mkdir $SANDBOX_ROOT/tmp/real; echo kept > $SANDBOX_ROOT/tmp/real/f")
    await sh(box, f'd="$SANDBOX_ROOT/app/d"; {script}')
    await box.reset_dir("/app/d")
    assert (
        await sh(box, 'd="$SANDBOX_ROOT/app/d"; ls -A "$d"; [ -d "$d" ] && [ ! -L "$d" ] && touch "$d/new" && echo ok')
    ).stdout == "ok\n"
    assert await box.get_text("/tmp/real/f") == "kept\n"


async def test_a_private_folder_is_closed_to_everybody_but_root(backend: Backend, start: Start) -> None:
    if not backend.traits.users:
        pytest.skip("this backend has one user")
    box = await start(user="nobody")
    await box.reset_dir("/private/deep", private=True)
    result = await sh(box, "ls /private; ls /private/deep; touch /private/x; touch /private/deep/x; rm -rf /private")
    assert result.stdout == ""
    told = await sh(box, "stat -c '%u %a' /private /private/deep", user="root")
    assert told.stdout.split() == ["0", "700", "0", "700"]


# --- jobs --------------------------------------------------------------------------------------------------------


async def test_a_job_is_followed_to_its_end(box: Sandbox) -> None:
    job = await box.start_job(
        Command.shell("cat; echo err >&2; echo $GIVEN; pwd; sleep 0.5; exit 3", stdin="in\n", env={"GIVEN": "env"})
    )
    status = await box.wait_job(job, 20)
    assert (status.running, status.exit_code, status.lost, status.timed_out) == (False, 3, False, False)
    assert status.stdout == f"in\nenv\n{box.resolve(box.workdir)}\n" and status.stderr == "err\n"
    assert await box.job(job) == status
    assert status.duration_s is not None and 0.4 <= status.duration_s < 20 and not status.oom


async def test_a_running_job_shows_what_it_wrote_so_far(box: Sandbox) -> None:
    job = await box.start_job(Command.shell("echo early; sleep 300"))
    await until(lambda: _said(box, job, "early\n"))
    status = await box.wait_job(job, 0.2)
    assert status.running and status.exit_code is None and status.duration_s is None and not status.lost
    await box.kill_job(job)
    await box.kill_job(job)
    ended = await box.wait_job(job, 10)
    assert not ended.running and ended.exit_code != 0 and ended.stdout == "early\n"


async def _said(box: Sandbox, job: str, text: str) -> bool:
    return (await box.job(job)).stdout == text


async def test_a_jobs_time_limit_is_held_inside(box: Sandbox) -> None:
    job = await box.start_job(
        Command.shell(
            "echo begun; cd $SANDBOX_ROOT/tmp; "
            "setsid sh -c 'echo $$ > child; trap \"\" TERM; sleep 300; sleep 300' & sleep 300",
            timeout_s=1,
        )
    )
    await asyncio.sleep(1.0)  # nobody asks meanwhile
    status = await box.wait_job(job, 10)
    assert status.timed_out and status.exit_code is None and not status.running and status.stdout == "begun\n"
    await until(lambda: _not(alive(box, "child")), 3.0)


async def _not(value: Awaitable[bool]) -> bool:
    return not await value


async def test_jobs_that_cannot_start_or_die_are_told_apart(box: Sandbox) -> None:
    missing = await box.wait_job(await box.start_job(Command(["no-such-program"])), 10)
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr
    no_folder = await box.wait_job(await box.start_job(Command(["true"], cwd="/gone")), 10)
    assert no_folder.exit_code == 126 and "/gone" in no_folder.stderr
    killed = await box.wait_job(await box.start_job(Command.shell("kill -9 $$")), 10)
    assert killed.exit_code == 137
    lost = await box.start_job(Command(["sleep", "300"]))
    await box.kill_all()
    status = await box.wait_job(lost, 10)
    assert status.lost and status.exit_code is None and not status.running


async def test_an_unknown_job_is_a_key_error(box: Sandbox) -> None:
    for job in ("job-0123456789abcdef", "nonsense", "../../etc"):
        with pytest.raises(KeyError):
            await box.job(job)


async def test_a_jobs_long_output_is_cut_in_the_middle(box: Sandbox) -> None:
    job = await box.start_job(Command.shell("echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last"))
    status = await box.wait_job(job, 30)
    assert status.truncated and status.stdout.startswith("first\nx") and status.stdout.endswith("x\nlast\n")
    assert len(status.stdout) < 4_100_000 and "bytes cut ...]" in status.stdout


async def test_a_job_leaves_its_servers_and_other_commands_alone(box: Sandbox) -> None:
    job = await box.start_job(Command.shell("sh -c 'echo $$ > $SANDBOX_ROOT/tmp/child; exec sleep 300' & echo hi"))
    status = await box.wait_job(job, 10)
    assert status.exit_code == 0 and status.stdout == "hi\n"
    await until(lambda: _written(box, "/tmp/child"))
    assert (await sh(box, "sleep 300", timeout_s=0.2)).timed_out
    assert await alive(box, "child")


# --- killing, limits, life ---------------------------------------------------------------------------------------


async def test_kill_all_leaves_nothing_and_the_box_works_on(box: Sandbox) -> None:
    await sh(
        box,
        "(setsid sh -c 'trap \"\" TERM; echo $$ > $SANDBOX_ROOT/tmp/a; while :; do sleep 0.1; done' &); "
        '(env -i sh -c "echo \\$\\$ > $SANDBOX_ROOT/tmp/b; exec sleep 300" &)',
    )
    task = asyncio.create_task(sh(box, "echo $$ > $SANDBOX_ROOT/tmp/c; sleep 300"))
    for name in "abc":
        await until(lambda name=name: _written(box, f"/tmp/{name}"))
    await box.kill_all()
    for name in "abc":
        assert not await alive(box, name)
    assert (await asyncio.wait_for(task, 5)).exit_code == 137
    await box.kill_all()
    assert (await sh(box, "echo works")).stdout == "works\n"


BOMBS = {
    "shell": "f() { f | f & }; f; sleep 300",
    "respawning": "i=0; while [ $i -lt 10 ]; do (while :; do sleep 0.01; done) & i=$((i+1)); done; wait",
    "orphans": "while :; do (sleep 0.2 &); done",
}


@pytest.mark.parametrize("script", BOMBS.values(), ids=BOMBS)
async def test_a_fork_bomb_is_ended(request: pytest.FixtureRequest, start: Start, script: str) -> None:
    if request.node.callspec.params["backend"] == "local" and script == BOMBS["shell"]:
        pytest.skip("it counts processes once a second, and this one doubles in less")
    if request.node.callspec.params["backend"] == "harbor":
        with pytest.raises(SandboxError, match="cannot limit processes"):
            await start(limits=Limits(processes=60))
        pytest.skip("Harbor's environments have no limit on processes, and a task that asks for one is refused")
    box = await start(limits=Limits(processes=60))
    began = time.monotonic()
    result = await sh(box, script, timeout_s=1.0)
    assert result.timed_out or result.exit_code is not None
    await box.kill_all()
    assert time.monotonic() - began < 20
    assert (await sh(box, "echo works")).stdout == "works\n"
    count = await sh(box, "n=0; for d in /proc/[0-9]*; do n=$((n+1)); done; echo $n")
    assert count.exit_code == 0


async def test_too_much_memory_is_seen(backend: Backend, start: Start) -> None:
    if "memory_mb" not in backend.traits.limits:
        pytest.skip("this backend has no memory limit")
    box = await start(limits=Limits(memory_mb=64))
    script = "import time; x = bytearray(300_000_000); x[::4096] = b'1' * len(x[::4096]); time.sleep(10)"
    result = await box.run(Command(["python3", "-c", script], timeout_s=30))
    assert result.exit_code == 137 and result.oom and not result.timed_out
    fine = await sh(box, "echo works")
    assert fine.stdout == "works\n" and not fine.oom


async def test_a_file_larger_than_the_limit_is_not_written(backend: Backend, start: Start) -> None:
    if "file_mb" not in backend.traits.limits:
        pytest.skip("this backend has no limit on one file")
    box = await start(limits=Limits(file_mb=1))
    result = await sh(box, 'head -c 5000000 /dev/zero > "$SANDBOX_ROOT/app/big"; stat -c %s "$SANDBOX_ROOT/app/big"')
    assert result.stdout.strip() == str(2**20)


async def test_the_number_of_processes_is_limited(backend: Backend, start: Start) -> None:
    if "processes" not in backend.traits.limits:
        pytest.skip("this backend has no limit on processes")
    box = await start(limits=Limits(processes=30))
    result = await sh(box, "i=0; while [ $i -lt 100 ]; do sleep 20 & i=$((i+1)); done; echo all; wait", timeout_s=10)
    assert result.timed_out or result.exit_code != 0


async def test_after_the_deadline_everything_is_dead_and_calls_fail(start: Start) -> None:
    box = await start(limits=Limits(deadline_s=3))
    began = time.monotonic()
    result = await sh(box, "echo begun; sleep 300")
    assert time.monotonic() - began < 3 + SLACK_S
    assert result.timed_out and result.exit_code is None and result.stdout == "begun\n"
    with pytest.raises(SandboxError, match="deadline"):
        await sh(box, "true")
    with pytest.raises(SandboxError):
        await box.start_job(Command(["true"]))


async def test_renewing_starts_the_deadline_anew(start: Start) -> None:
    box = await start(limits=Limits(deadline_s=2.5))
    await asyncio.sleep(1.5)
    await box.renew()
    assert (await sh(box, "sleep 1.5; echo ok")).stdout == "ok\n"


async def test_a_stopped_box_is_gone_for_good(backend: Backend) -> None:
    box = backend.sandbox(BoxSpec("conformance"))
    with pytest.raises(SandboxError, match="not started"):
        await box.run(Command(["true"]))
    async with box:
        task = asyncio.create_task(sh(box, "touch $SANDBOX_ROOT/tmp/begun; sleep 300"))
        await until(lambda: _exists(box, "/tmp/begun"))
        await box.stop()
        with pytest.raises(SandboxError, match="gone"):
            await asyncio.wait_for(task, 10)
        for call in (
            box.run(Command(["true"])),
            box.get_text("/x"),
            box.kill_all(),
            box.start_job(Command(["true"])),
            box.renew(),
        ):
            with pytest.raises(SandboxError, match="gone"):
                await call
        await box.stop()


async def _exists(box: Sandbox, path: str) -> bool:
    return await box.get_text(path) is not None


async def test_two_boxes_share_nothing(start: Start) -> None:
    one, two = await asyncio.gather(start(), start())
    assert one.sandbox_id != two.sandbox_id
    await one.put_text("one", "/app/file")
    assert await two.get_text("/app/file") is None
    await sh(one, "(exec sleep 300 &)")
    await two.kill_all()
    assert (await sh(one, "echo works")).stdout == "works\n"


async def test_a_mounted_folder_is_there_and_cannot_be_written(backend: Backend, start: Start, tmp_path: Path) -> None:
    from sandboxes.base import Mount

    source = tmp_path / "tools"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (source / "bin" / "tool").chmod(0o755)
    box = await start(mounts=(Mount(source, "/opt/tools"),))
    assert (await box.run(Command([box.resolve("/opt/tools/bin/tool")]))).stdout == "tool\n"
    if not backend.traits.boundary:
        return  # its processes write wherever we may
    await box.run(Command(["sh", "-c", 'echo bad > "$0"', box.resolve("/opt/tools/bin/tool")]))
    assert (source / "bin" / "tool").read_text() == "#!/bin/sh\necho tool\n"


async def test_a_healthy_box_starts_and_one_that_never_is_fails_for_good(backend: Backend, tmp_path: Path) -> None:
    # It fails twice within the start period, which does not count, and is fine then.
    count = "n=$(cat $SANDBOX_ROOT/tmp/n 2>/dev/null); n=$((n + 1)); echo $n > $SANDBOX_ROOT/tmp/n; [ $n -ge 3 ]"
    slow = Healthcheck(count, interval_s=0.1, start_period_s=30, start_interval_s=0.1, retries=1)
    async with backend.sandbox(BoxSpec("slow", healthcheck=slow)) as box:
        assert await box.get_text("/tmp/n") == "3\n"
    sick = Healthcheck("echo it is broken; exit 1", interval_s=0.05, retries=2)
    with pytest.raises(SetupFailed, match="broken") as failure:
        async with backend.sandbox(BoxSpec("sick", healthcheck=sick)):
            pytest.fail("it started")
    if failure.value.log_path is not None:
        assert "it is broken" in failure.value.log_path.read_text()
        failure.value.log_path.unlink()


async def test_orphans_are_buried(backend: Backend, box: Sandbox) -> None:
    """Process 1 is one that waits for what it inherits."""
    if not backend.traits.boundary:
        pytest.skip("process 1 is this machine's")
    await sh(box, "i=0; while [ $i -lt 5 ]; do (sleep 0.1 &); i=$((i+1)); done; sleep 0.5")
    states = await sh(box, 'for d in /proc/[0-9]*; do read -r line < $d/stat && echo "${line##*)}"; done 2>/dev/null')
    mine = [line for line in states.stdout.splitlines() if line.startswith(" Z 1 ")]
    assert mine == []


async def test_a_command_is_quick(box: Sandbox) -> None:
    times = []
    for _ in range(5):
        times.append((await box.run(Command(["true"]))).duration_s)
    assert sorted(times)[2] < 2.0


async def test_a_box_can_be_taken_over_only_when_it_exists(backend: Backend) -> None:
    with pytest.raises(SandboxGone):
        await backend.attach("sandbox-1-1-00000000")


async def test_a_box_can_be_kept_for_a_successor_and_works_on(box: Sandbox) -> None:
    await box.keep(Keeper(Owner.current(), "runner"), time.time() + 60)
    assert (await sh(box, "echo on")).stdout == "on\n"
