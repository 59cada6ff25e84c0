"""Files in and out of a folder that the agent could have prepared against us."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.base import Command, LeftOut, NoSuchPath, Sandbox, SandboxError, TooLarge


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("keep")
    return folder


def is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


async def plant(box: Sandbox, script: str) -> None:
    result = await box.run(Command(["sh", "-c", script]))
    assert result.exit_code == 0, result.stderr


async def test_standard_folders_exist_and_tests_do_not(box: Sandbox) -> None:
    script = "find app home tmp logs -type d; test -e tests && echo tests"
    listing = (await box.run(Command.shell(script, cwd="/"))).stdout.split()
    assert sorted(listing) == ["app", "home", "logs", "logs/agent", "logs/artifacts", "logs/verifier", "tmp"]
    for folder in listing:
        assert (await box.run(Command(["touch", f"{box.resolve('/' + folder)}/mine"]))).exit_code == 0


async def test_text_round_trip_with_mode(box: Sandbox) -> None:
    await box.put_text("#!/bin/sh\necho né\n", "/app/sub/run.sh", 0o755)
    assert await box.get_text("/app/sub/run.sh") == "#!/bin/sh\necho né\n"
    assert (await box.run(Command(["./sub/run.sh"]))).stdout == "né\n"
    await box.put_text("lone surrogate \udc80", "/app/odd")
    assert await box.get_text("/app/odd") == "lone surrogate \\udc80"


async def test_reading_is_capped_and_escaped(box: Sandbox) -> None:
    await plant(box, r"head -c 5000000 /dev/zero | tr '\0' x > big; printf 'a\377' > bad")
    assert len(await box.get_text("/app/big", cap=10) or "") == 10
    assert await box.get_text("/app/bad") == "a\\xff"


@pytest.mark.parametrize(
    "plan",
    [
        "ln -s $OUTSIDE/precious $V/reward.txt",
        "rmdir $V; mkdir $SANDBOX_ROOT/tmp/v; ln -s $SANDBOX_ROOT/tmp/v $V; echo 1 > $V/reward.txt",
        "mkdir $V/reward.txt",
        "mkfifo $V/reward.txt",
        "ln -s /dev/zero $V/reward.txt",
        "true",
    ],
)
async def test_only_a_regular_file_behind_real_folders_is_read(box: Sandbox, outside: Path, plan: str) -> None:
    await plant(box, f"OUTSIDE={outside}; V=$SANDBOX_ROOT/logs/verifier; {plan}")
    assert await box.get_text("/logs/verifier/reward.txt") is None


@pytest.mark.parametrize(
    "plan",
    [
        "rm -r $SANDBOX_ROOT/logs/*; rmdir $SANDBOX_ROOT/logs; ln -s $OUTSIDE $SANDBOX_ROOT/logs; true",
        "rm -r $SANDBOX_ROOT/logs/*; rmdir $SANDBOX_ROOT/logs; echo file > $SANDBOX_ROOT/logs; true",
        "rmdir $V; ln -s $OUTSIDE $V",
        "rmdir $V; echo file > $V",
        "mkdir -p $V/a/b; touch $V/a/b/c; chmod 0 $V/a",
        "chmod 0 $V",
        "rm -r $SANDBOX_ROOT/logs/*",
    ],
)
async def test_a_folder_reset_is_real_empty_and_ours(
    box: Sandbox, outside: Path, on_host: Callable[[str], Path], plan: str
) -> None:
    await plant(box, f"OUTSIDE={outside}; V=$SANDBOX_ROOT/logs/verifier; {plan}")
    await box.reset_dir("/logs/verifier")
    assert is_real_folder(on_host("/logs/verifier")) and os.listdir(on_host("/logs/verifier")) == []
    await plant(box, "touch $SANDBOX_ROOT/logs/verifier/mine")
    await box.put_text("x", "/logs/verifier/x")
    assert os.listdir(outside) == ["precious"] and (outside / "precious").read_text() == "keep"


@pytest.mark.parametrize("plan", ["ln -s $OUTSIDE/precious target", "mkdir -p target/full", "ln -s nowhere target"])
async def test_writing_replaces_what_is_at_the_target(
    box: Sandbox, outside: Path, on_host: Callable[[str], Path], plan: str
) -> None:
    await plant(box, f"OUTSIDE={outside}; V=$SANDBOX_ROOT/logs/verifier; {plan}")
    await box.put_text("ours", "/app/target")
    assert await box.get_text("/app/target") == "ours"
    assert (outside / "precious").read_text() == "keep"
    assert os.listdir(on_host("/app")) == ["target"]


async def test_a_folder_is_copied_with_modes_links_and_over_traps(
    box: Sandbox, outside: Path, on_host: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "tool.sh").write_text("echo tool")
    (source / "deep" / "tool.sh").chmod(0o4755)
    (source / "link").symlink_to("deep/tool.sh")
    (source / "trap").write_text("ours")
    await plant(box, f"mkdir tests; cd tests; ln -s {outside}/precious trap; ln -s {outside} deep")
    await box.put_dir(source, "/app/tests")
    assert await box.get_text("/app/tests/trap") == "ours"
    copied = on_host("/app/tests")
    assert (copied / "deep/tool.sh").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(copied / "link") == "deep/tool.sh" and (copied / "deep" / "empty").is_dir()
    assert os.listdir(outside) == ["precious"] and (outside / "precious").read_text() == "keep"


@pytest.mark.parametrize("kind", ["absolute", "relative", "fifo", "missing"])
async def test_a_source_that_leaves_itself_is_refused(box: Sandbox, outside: Path, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if kind == "absolute":
        (source / "link").symlink_to(outside / "precious")
    elif kind == "relative":
        (source / "link").symlink_to("../outside")
    elif kind == "fifo":
        os.mkfifo(source / "fifo")
    else:
        source.rmdir()
    with pytest.raises(SandboxError, match="cannot copy"):
        await box.put_dir(source, "/tests")


async def test_paths_cannot_climb_out_and_must_be_absolute(box: Sandbox) -> None:
    root = box.resolve("/").rstrip("/")
    assert box.resolve("/../../etc/passwd") == f"{root}/etc/passwd"
    assert await box.get_text("/../../../../../../etc/passwd") is None
    for path in ("app/x", "", "/a\0b"):
        with pytest.raises(ValueError, match="absolute"):
            box.resolve(path)


async def test_what_is_put_belongs_to_the_sandboxs_user(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_text("x")
    (source / "sub").chmod(0o555)
    await box.put_dir(source, "/app/put")
    await box.put_file(source / "sub" / "file", "/app/deep/file")
    await box.put_text("x", "/app/deeper/text")
    script = (
        "echo y >> put/sub/file && echo y >> deep/file && echo y > deep/new && echo y >> deeper/text; ls -ld put/sub"
    )
    result = await box.run(Command.shell(script))
    assert result.exit_code == 0 and result.stdout.startswith("dr-xr-xr-x"), result


async def test_a_file_keeps_its_permissions_both_ways(box: Sandbox, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_bytes(b"#!/bin/sh\nprintf 'a\\377b'\n")
    tool.chmod(0o750)
    await box.put_file(tool, "/app/bin/tool")
    assert (await box.run(Command(["./bin/tool"]))).stdout == "a\\xffb"
    await plant(box, "./bin/tool > out; chmod 640 out")
    await box.get_file("/app/out", tmp_path / "new" / "out")
    copied = tmp_path / "new" / "out"
    assert copied.read_bytes() == b"a\xffb" and copied.stat().st_mode & 0o777 == 0o640
    for path in ("/app/none", "/app", "/app/bin/tool/x"):
        with pytest.raises(NoSuchPath):
            await box.get_file(path, tmp_path / "never")
    with pytest.raises(TooLarge):
        await box.get_file("/app/out", tmp_path / "never", cap=2)
    assert not (tmp_path / "never").exists()
    with pytest.raises(SandboxError, match="cannot copy"):
        await box.put_file(tmp_path, "/app/folder")


HOSTILE = """
mkdir -p a/empty sub/deep; echo kept > a/file; chmod 750 a; ln -s a/file good; ln -s ../a/file sub/up
ln -s $OUTSIDE/precious abs; ln -s ../../../../etc/passwd climbs; mkfifo fifo; ln -s loop loop
ln -s d/../../x e; ln -s . d; ln -s nowhere dangling
"""


async def test_a_folder_comes_out_without_what_leaves_it(box: Sandbox, outside: Path, tmp_path: Path) -> None:
    await plant(box, f"OUTSIDE={outside}; {HOSTILE}")
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").symlink_to(outside)  # of an earlier copy, say
    left = await box.get_dir("/app", target)
    found = {str(p.relative_to(target)) for p in target.rglob("*")}
    assert found == {"a", "a/empty", "a/file", "sub", "sub/deep", "sub/up", "good", "d", "dangling"}
    assert sorted(left, key=str) == sorted(
        [
            LeftOut("abs", f"{outside}/precious"),
            LeftOut("climbs", "../../../../etc/passwd"),
            LeftOut("e", "d/../../x"),
            LeftOut("fifo"),
            LeftOut("loop", "loop"),
        ],
        key=str,
    )
    assert (target / "good").read_text() == "kept\n" and (target / "a").stat().st_mode & 0o777 == 0o750
    assert os.listdir(outside) == ["precious"]


async def test_a_folder_that_is_none_or_too_large_does_not_come_out(box: Sandbox, tmp_path: Path) -> None:
    await plant(box, "ln -s . link; echo x > file; head -c 3000000 /dev/zero > big")
    for path in ("/app/link", "/app/file", "/app/none", "/app/file/x"):
        with pytest.raises(NoSuchPath):
            await box.get_dir(path, tmp_path / "out")
    with pytest.raises(TooLarge):
        await box.get_dir("/app", tmp_path / "out", cap=2_000_000)
    assert not (tmp_path / "out" / "big").exists()


async def test_writing_while_the_agent_swaps_folders_for_links_stays_inside(box: Sandbox, outside: Path) -> None:
    swap = f"while :; do mkdir -p d; rm -rf d; ln -sfn {outside} d; rm -f d; done"
    await box.run(Command.shell(f"({swap}) >/dev/null 2>&1 &"))
    for number in range(200):
        try:
            await box.put_text("ours", f"/app/d/file{number}")
            await box.reset_dir("/app/d/sub")
        except SandboxError:
            continue  # it would not stand still
    assert os.listdir(outside) == ["precious"]


async def test_very_deep_folders_are_left_out_and_can_be_reset(box: Sandbox, tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(1500): os.mkdir('a' * 10); os.chdir('a' * 10)"
    assert (await box.run(Command(["python3", "-c", deep]))).exit_code == 0
    left = await box.get_dir("/app", tmp_path / "out")
    assert len(left) == 1 and left[0].name.count("/") == 100
    await box.reset_dir("/app")
    assert await box.get_dir("/app", tmp_path / "out2") == () and os.listdir(tmp_path / "out2") == []
