"""Commands and archives in E2B where its daemon has ways of its own."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Command, Limits, Sandbox, SandboxError
from tests.sandboxes.e2b_opening import SPEC, open_e2b
from tests.sandboxes.e2b_standin import Standin


@pytest.fixture
async def box(standin: Standin, tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with open_e2b(standin, tmp_path) as backend, backend.sandbox(SPEC) as started:
        yield started


@pytest.mark.parametrize(("number", "code"), [(9, 137), (15, 143), (11, 139), (6, 134)])
async def test_the_end_by_a_signal_is_the_shells_number(box: Sandbox, number: int, code: int) -> None:
    assert (await box.run(Command.shell(f"kill -{number} $$"))).exit_code == code


async def test_bytes_that_are_no_text_are_kept(box: Sandbox) -> None:
    result = await box.run(Command.shell(r"printf 'a\377\303'; sleep 0.1; printf '\251\0b'; printf '\376' >&2"))
    assert (result.stdout, result.stderr) == ("a\\xffé\0b", "\\xfe")


@pytest.mark.parametrize("script", ["wc -c", "head -c 3 >/dev/null; echo 2000000", "exec <&-; sleep 0.2; echo 2000000"])
async def test_standard_input_of_any_size_whether_read_or_not(box: Sandbox, script: str) -> None:
    result = await asyncio.wait_for(box.run(Command.shell(script, stdin="x" * 2_000_000)), 20)
    assert (result.exit_code, result.stdout.strip()) == (0, "2000000")


@pytest.mark.parametrize(
    ("user", "ids"), [("1234", "1234:1234"), ("0", "0:0"), ("1000", "1000:1000"), ("nobody", "65534:65534")]
)
async def test_users_by_name_and_by_number(box: Sandbox, user: str, ids: str) -> None:
    result = await box.run(Command.shell("echo $(id -u):$(id -g)", user=user))
    assert result.stdout == f"{ids}\n"


async def test_a_user_that_does_not_exist_is_an_error_that_names_it(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="stranger"):
        await box.run(Command(["true"], user="stranger"))


async def test_a_login_profile_of_the_agents_does_not_run(box: Sandbox) -> None:
    for name in (".profile", ".bash_profile", ".bashrc"):
        await box.put_text("touch /tmp/planted; exit 7\n", f"/home/user/{name}")
    assert (await box.run(Command(["test", "-e", "/tmp/planted"]))).exit_code == 1


async def test_limits_of_a_command_are_not_those_of_our_own_work(standin: Standin, tmp_path: Path) -> None:
    limits = Limits(deadline_s=300, cpu_s=1, file_mb=1)
    async with open_e2b(standin, tmp_path) as backend, backend.sandbox(replace(SPEC, limits=limits)) as box:
        assert (await box.run(Command.shell("while :; do :; done", timeout_s=10))).exit_code in (137, 152)
        assert (await box.run(Command.shell("head -c 3000000 /dev/zero > /app/x"))).exit_code != 0
        (tmp_path / "large").write_bytes(b"x" * 3_000_000)
        await box.put_file(tmp_path / "large", "/app/large")
        assert (await box.run(Command(["stat", "-c", "%s", "/app/large"]))).stdout == "3000000\n"


@pytest.mark.parametrize(
    "before", ["mkdir -p a/b/c", "ln -s /etc a", "echo x > a", "ln -s /etc/passwd a", "mkdir a; ln -s /etc a/b"]
)
async def test_what_is_in_the_way_of_an_upload_is_replaced_and_never_followed(
    box: Sandbox, tmp_path: Path, before: str
) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "passwd").write_text("mine")
    (source / "odd \n -n*'").write_text("odd")
    (source / "file").write_text("f")
    passwd = await box.get_text("/etc/passwd")
    assert (await box.run(Command.shell(f"mkdir t; cd t; mkdir file; {before}"))).exit_code == 0
    await box.put_dir(source, "/app/t")
    assert await box.get_text("/app/t/a/b/passwd") == "mine" and await box.get_text("/app/t/file") == "f"
    assert await box.get_text("/etc/passwd") == passwd
    assert "odd \n -n*'" in (await box.run(Command.shell("ls t"))).stdout
    assert (await box.run(Command(["ls", "-A", "/root"], user="root"))).stdout == ".harness-trainer.json\n"


async def test_an_archive_larger_than_the_cap_is_left_half_way(box: Sandbox, tmp_path: Path) -> None:
    await box.run(Command.shell("truncate -s 50G /app/huge"))
    with pytest.raises(SandboxError, match="more than"):
        await asyncio.wait_for(box.get_dir("/app", tmp_path / "out", cap=1000), 20)
    assert (await box.run(Command(["true"]))).exit_code == 0


def test_archives_names_are_read_from_where_the_file_stands() -> None:
    from sandboxes.archive import names_in

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), (os.fsdecode(b"a/\xff"), tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
    file.seek(0)
    assert names_in(file) == b"./a/\0./a/\xff\0" and file.tell() == 0
