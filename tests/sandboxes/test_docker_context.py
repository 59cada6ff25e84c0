"""What an image is built from: which folders are equal, and the label on every layer."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.base import SetupFailed
from sandboxes.docker_context import Context, mark_layers

LABEL = "LABEL harness-trainer.layer=1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "environment"
    (made / "data" / "empty").mkdir(parents=True)
    (made / "Dockerfile").write_text("FROM base\nCOPY . /app\n")
    (made / "data" / "a").write_text("a")
    (made / "link").symlink_to("data/a")
    return made


def rewrite(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte": lambda f: (f / "data" / "a").write_text("b"),
    "a name": lambda f: (f / "data" / "a").rename(f / "data" / "b"),
    "executable": lambda f: (f / "data" / "a").chmod(0o755),
    "a link's target": lambda f: relink(f / "link", "data/b"),
    "a link became its file": lambda f: rewrite(f / "link", "a"),
    "a new file": lambda f: (f / "data" / "c").touch(),
    "a new empty folder": lambda f: (f / "data" / "more").mkdir(),
    "an empty folder gone": lambda f: (f / "data" / "empty").rmdir(),
    "the Dockerfile": lambda f: (f / "Dockerfile").write_text("FROM base\nCOPY . /app \n"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_difference_that_an_image_can_show_changes_the_digest(folder: Path, what: str) -> None:
    before = Context.read(folder).digest
    CHANGES[what](folder)
    assert Context.read(folder).digest != before


def test_equal_folders_have_equal_digests_wherever_and_whenever_they_are(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    (other / "data" / "empty").mkdir(parents=True)
    (other / "link").symlink_to("data/a")
    (other / "data" / "a").write_text("a")
    (other / "Dockerfile").write_text("FROM base\nCOPY . /app\n")
    os.utime(other / "data" / "a", (1, 1))
    assert Context.read(folder).digest == Context.read(other).digest


def test_content_cannot_be_moved_between_files_unseen(folder: Path) -> None:
    (folder / "x").write_text("ab")
    (folder / "y").write_text("c")
    before = Context.read(folder).digest
    (folder / "x").write_text("a")
    (folder / "y").write_text("bc")
    assert Context.read(folder).digest != before


def test_what_dockerignore_names_neither_counts_nor_travels(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# not these\n*.log\n\nsecret/\nDockerfile\n!data/keep.log\n")
    (folder / "data" / "keep.log").touch()
    before = Context.read(folder)
    (folder / "run.log").write_text("1")
    (folder / "secret").mkdir()
    (folder / "secret" / "key").write_text("k")
    after = Context.read(folder)
    assert after.digest == before.digest
    with after.archive() as file, tarfile.open(fileobj=file) as tar:
        names = tar.getnames()
    assert "data/keep.log" in names and "run.log" not in names and "secret/key" not in names
    assert names.count("Dockerfile") == 1, "the builder needs it even where it is ignored"


def test_a_link_out_of_the_folder_travels_as_a_link_and_is_never_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("key")
    (folder / "out").symlink_to(tmp_path / "private")
    with Context.read(folder).archive() as file:
        assert b"key" not in file.read()


def test_the_archive_has_no_name_that_a_killed_process_could_leave(folder: Path) -> None:
    with Context.read(folder).archive() as file:
        assert os.readlink(f"/proc/self/fd/{file.fileno()}").endswith(" (deleted)")


@pytest.mark.parametrize("make", ["nothing", "folder", "outside"])
def test_a_folder_without_a_dockerfile_of_its_own_is_refused(folder: Path, make: str) -> None:
    path = folder / "Dockerfile"
    path.unlink()
    if make == "folder":
        path.mkdir()
    elif make == "outside":
        (folder.parent / "other").write_text("FROM base\n")
        path.symlink_to(folder.parent / "other")
    with pytest.raises(SetupFailed, match="Dockerfile"):
        Context.read(folder)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("FROM a", f"FROM a\n{LABEL}"),
        ("FROM a\nRUN b\n", f"FROM a\n{LABEL}RUN b\n"),
        ("ARG V=1\nfrom a:$V as x\nFROM b\n", f"ARG V=1\nfrom a:$V as x\n{LABEL}FROM b\n{LABEL}"),
        ("FROM a \\\n # why\n\n  AS x\nRUN b\n", f"FROM a \\\n # why\n\n  AS x\n{LABEL}RUN b\n"),
        ("FROM a\r\nRUN b\r\n", f"FROM a\n{LABEL}RUN b\r\n"),
        (
            "FROM a\nRUN python -c 'x' && \\\n FROM b\nCMD c\n",
            f"FROM a\n{LABEL}RUN python -c 'x' && \\\n FROM b\nCMD c\n",
        ),
        ("FROM a\nRUN x \\\n# FROM c \\\n\n FROM b \\\n\nFROM d\nRUN e\n", None),
        (
            "# escape=`\nFROM a `\n AS x\nRUN c:\\\nFROM b\n",
            f"# escape=`\nFROM a `\n AS x\n{LABEL}RUN c:\\\nFROM b\n{LABEL}",
        ),
        ("# note\n# escape=`\nFROM a\nRUN x \\\n FROM b\n", None),
        ("FROMAGE\n#FROM a\n", "FROMAGE\n#FROM a\n"),
        ("", ""),
    ],
)
def test_the_label_follows_every_from_and_nothing_else(text: str, marked: str | None) -> None:
    if marked is None:  # one label, after the first FROM: what looks like a second one belongs to a RUN
        assert mark_layers(text).count(LABEL) == 1
        assert mark_layers(text).split("\n" + LABEL)[0].endswith("FROM a")
    else:
        assert mark_layers(text) == marked
