"""Archives that go into a sandbox, and archives that a stranger's code could have written."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.archive import Capped, pack, pack_file, unpack, unpack_file
from sandboxes.base import LeftOut, NoSuchPath, SandboxError, TooLarge

TYPES = [
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.CONTTYPE,
]
PART = st.sampled_from(["a", "b", "c", "..", ".", "", "f\n", "ü", "x" * 300])
NAME = st.lists(PART, min_size=1, max_size=5).map("/".join)
LINK = st.one_of(NAME, NAME.map("../".__add__), st.sampled_from(["/etc", "..", "../..", "d/a", "../outside/kept", ""]))


@st.composite
def entry(draw: st.DrawFn) -> tarfile.TarInfo:
    info = tarfile.TarInfo(draw(st.one_of(NAME.map("d/".__add__), NAME.map("d/".__add__), NAME, NAME.map("/".__add__))))
    info.type = draw(st.sampled_from(TYPES))
    info.mode = draw(st.sampled_from([0, 0o644, 0o7777, 0o555]))
    info.linkname = draw(LINK)
    info.size = draw(st.integers(0, 5)) if info.type == tarfile.REGTYPE else 0
    return info


def archive_of(*entries: tarfile.TarInfo | tuple[str, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for one in [("d", None), *entries]:
            if isinstance(one, tuple):
                info, data = tarfile.TarInfo(one[0]), one[1]
                info.type, info.mode = (tarfile.DIRTYPE, 0o755) if data is None else (tarfile.REGTYPE, 0o644)
                info.size = len(data or b"")
            else:
                info, data = one, b"data!"[: one.size]
            tar.addfile(info, io.BytesIO(data or b""))
    file.seek(0)
    return file


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


@given(st.lists(entry(), max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_gets_out_of_the_target(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tarfile.TarInfo]
) -> None:
    base = tmp_path_factory.mktemp("unpack")
    outside, target = base / "outside", base / "place" / "target"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o600)
    (base / "place").mkdir()
    unpack(archive_of(*entries), target)
    assert sorted(p.name for p in base.iterdir()) == ["outside", "place"]
    assert [p.name for p in (base / "place").iterdir()] == ["target"]
    assert [p.name for p in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept" and (outside / "kept").stat().st_mode & 0o777 == 0o600
    assert (outside / "kept").stat().st_nlink == 1
    for folder, folders, names in os.walk(target):
        for name in [*folders, *names]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            assert not mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) or stat.S_ISLNK(mode)
            assert Path(os.path.realpath(path)).is_relative_to(target.resolve())


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    for to in (str(outside), "../outside"):
        left_out = unpack(archive_of(link("d/l", to), ("d/l/file", b"planted")), tmp_path / "target")
        assert (outside / "file").read_text() == "kept"
        assert (tmp_path / "target" / "l" / "file").read_text() == "planted"  # in a folder of its own
        assert left_out == ()


def test_what_lies_in_the_target_already_is_not_followed(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "f").write_text("kept")
    (target / "sub").symlink_to(outside)
    (target / "file").symlink_to(outside / "f")
    unpack(archive_of(("d/sub/f", b"new"), ("d/file", b"new")), target)
    assert (outside / "f").read_text() == "kept"
    assert (target / "sub" / "f").read_text() == (target / "file").read_text() == "new"


def test_links_that_lead_out_only_together_are_left_out(tmp_path: Path) -> None:
    left_out = unpack(
        archive_of(("d/a", None), ("d/a/b", None), link("d/a/b/up", "../.."), link("d/out", "a/b/up/..")),
        tmp_path / "target",
    )
    assert left_out == (LeftOut("out", "a/b/up/.."),)
    assert (tmp_path / "target" / "a" / "b" / "up").is_symlink()


def test_a_hard_link_is_a_second_name_of_a_file_that_came_with_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    left_out = unpack(
        archive_of(
            ("d/file", b"data"),
            link("d/twin", "d/file", tarfile.LNKTYPE),
            link("d/soft", "file"),
            link("d/of-a-link", "d/soft", tarfile.LNKTYPE),
            link("d/climbs", "d/../../secret", tarfile.LNKTYPE),
            link("d/absolute", str(tmp_path / "secret"), tarfile.LNKTYPE),
            link("d/itself", "d/itself", tarfile.LNKTYPE),
        ),
        target,
    )
    assert (target / "twin").read_text() == "data"
    assert sorted(p.name for p in target.iterdir()) == ["file", "soft", "twin"]
    assert {entry.name for entry in left_out} == {"of-a-link", "climbs", "absolute", "itself"}


def sparse(size: int) -> io.BytesIO:
    """An archive of 2 KiB with one file of `size` bytes, all of them a hole."""
    info = tarfile.TarInfo("d/huge")
    info.size = 0
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.map": f"{size},0",
        "GNU.sparse.size": str(size),
    }
    return archive_of(info)


def test_a_hole_counts_in_full(tmp_path: Path) -> None:
    with pytest.raises(TooLarge):
        unpack(sparse(10**13), tmp_path / "target", cap=10**9)
    assert sum(p.stat().st_blocks for p in (tmp_path / "target").rglob("*")) < 1000


def test_the_cap_is_exact_and_counts_all_files(tmp_path: Path) -> None:
    entries = [("d/a", b"12345"), ("d/b", b"12345")]
    assert unpack(archive_of(*entries), tmp_path / "fits", cap=10) == ()
    with pytest.raises(TooLarge):
        unpack(archive_of(*entries), tmp_path / "no", cap=9)
    file = Capped(io.BytesIO(), 10)
    file.write(b"x" * 10)
    with pytest.raises(TooLarge):
        file.write(b"x")


@pytest.mark.parametrize("cut", [1, 600, 1025, 1600])
def test_a_damaged_archive_is_an_error(tmp_path: Path, cut: int) -> None:
    whole = archive_of(("d/file", b"x" * 5000)).getvalue()
    with pytest.raises(SandboxError):
        unpack(io.BytesIO(whole[:cut]), tmp_path / "target")
    garbled = bytearray(whole)
    garbled[512 + 148 : 512 + 156] = b"99999999"  # a checksum
    with pytest.raises(SandboxError):
        unpack(io.BytesIO(garbled), tmp_path / "target2")


def test_a_file_in_the_place_of_a_folder_is_no_folder(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("d"))
    for call in (unpack, unpack_file):
        file.seek(0)
        if call is unpack:
            with pytest.raises(NoSuchPath):
                unpack(file, tmp_path / "t")
        else:
            unpack_file(file, tmp_path / "f")
            assert (tmp_path / "f").read_bytes() == b""


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_only_a_regular_file_comes_out_as_a_file(tmp_path: Path, kind: bytes) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(link("d", "/etc/passwd", kind))
    file.seek(0)
    with pytest.raises(NoSuchPath):
        unpack_file(file, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_link_at_the_target_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "f").symlink_to(tmp_path / "kept")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("x")
        info.size, info.mode = 3, 0o640
        tar.addfile(info, io.BytesIO(b"new"))
    file.seek(0)
    unpack_file(file, tmp_path / "f")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "f").read_text() == "new" and (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_a_folder_that_forbids_writing_is_filled_all_the_same(tmp_path: Path) -> None:
    closed = tarfile.TarInfo("d/closed")
    closed.type, closed.mode = tarfile.DIRTYPE, 0o000
    unpack(archive_of(closed, ("d/closed/file", b"x")), tmp_path / "t")
    assert (tmp_path / "t" / "closed" / "file").read_bytes() == b"x"


def test_packing_names_owner_and_permissions_and_no_hard_links(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run").write_text("x")
    (source / "sub" / "run").chmod(0o4755)
    os.link(source / "sub" / "run", source / "twin")
    (source / os.fsdecode(b"odd\xff")).write_text("bytes")
    (source / "link").symlink_to("sub/run")
    file = io.BytesIO()
    pack(source, file, uid=1234, gid=99)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        members = {m.name: m for m in tar.getmembers()}
    assert set(members) == {"sub", "sub/run", "twin", "link", os.fsdecode(b"odd\xff")}
    assert {(m.uid, m.gid, m.uname) for m in members.values()} == {(1234, 99, "")}
    assert members["sub/run"].mode == 0o755 and members["twin"].isreg() and members["link"].issym()


@pytest.mark.parametrize("to", ["../secret", "/etc/passwd", "sub/../../secret"])
def test_links_that_leave_the_source_are_refused(tmp_path: Path, to: str) -> None:
    (tmp_path / "s" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "s" / "l").symlink_to(to)
    with pytest.raises(SandboxError, match="leaves the folder"):
        pack(tmp_path / "s", io.BytesIO(), uid=0, gid=0)


def test_special_files_and_missing_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s" / "fifo")
    with pytest.raises(SandboxError, match="not a file"):
        pack(tmp_path / "s", io.BytesIO(), uid=0, gid=0)
    for call in (pack, lambda source, file, **owner: pack_file(source, "x", file, **owner)):
        with pytest.raises(SandboxError, match="no such"):
            call(tmp_path / "missing", io.BytesIO(), uid=0, gid=0)


def test_a_linked_source_folder_is_packed_and_its_links_judged_from_where_it_really_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "real" / "l").symlink_to("file")
    (tmp_path / "alias").symlink_to("real")
    file = io.BytesIO()
    pack(tmp_path / "alias", file, uid=0, gid=0)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        assert sorted(tar.getnames()) == ["file", "l"]
