"""What an image is built from: a folder with a Dockerfile, its content hash and its archive.

Owns which files count (`.dockerignore`, by the SDK's own matcher), what the hash is over, and the label that each layer
gets. Builds nothing: `docker_build` does, and is the only caller beside `docker_images`. Blocking.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from docker.utils.build import create_archive, exclude_paths

from sandboxes.base import SetupFailed
from sandboxes.build_folder import digest_of, entry_parts
from sandboxes.docker_labels import LAYER

_SCHEME = "1"  # of the hash; another one builds every image anew
_FROM = re.compile(r"\s*FROM\s", re.IGNORECASE)
_DIRECTIVE = re.compile(r"#\s*[A-Za-z]\w*\s*=")
_ESCAPE = re.compile(r"#\s*escape\s*=\s*(\S)\s*$", re.IGNORECASE)
# What only BuildKit understands, and the SDK cannot ask for.
_BUILDKIT = (
    (re.compile(r"^\s*RUN\s+.*--(mount|network|security)\b", re.I | re.M), "RUN --mount"),
    (
        re.compile(r"^\s*(COPY|ADD)\s+.*--(chmod|link|parents|exclude|checksum|keep-git-dir)\b", re.I | re.M),
        "COPY --chmod",
    ),
    (re.compile(r"^\s*(RUN|COPY|ADD)\s+.*<<-?\s*['\"]?\w+", re.I | re.M), "<<EOF"),
)


@dataclass(frozen=True, slots=True)
class Context:
    """A folder to build. Equal folders (names, modes, bytes, link targets; not times or owners) have equal digests."""

    folder: Path
    files: tuple[str, ...]  # relative, sorted
    dockerfile: str
    digest: str  # 64 hex digits

    @classmethod
    def read(cls, folder: Path) -> Context:
        """Raises SetupFailed when the folder cannot be built whatever the engine."""
        try:
            dockerfile = _read_dockerfile(folder)
            files = tuple(sorted(exclude_paths(str(folder), _ignored(folder))))
            return cls(folder, files, dockerfile, digest_of(_parts(folder, files, dockerfile)))
        except OSError as e:
            raise SetupFailed(f"the image's folder {folder} cannot be read: {e}") from e

    def archive(self) -> IO[bytes]:
        """The tar archive for the engine, in a file without a name: nothing is left behind by a killed process."""
        archive = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            extra = [("Dockerfile", mark_layers(self.dockerfile))]
            create_archive(str(self.folder), files=self.files, fileobj=archive, extra_files=extra)
        except BaseException:
            archive.close()
            raise
        return archive

    def needs_buildkit(self) -> str:
        """An instruction that only BuildKit has, e.g. "RUN --mount"; "" = none was seen."""
        return next((name for pattern, name in _BUILDKIT if pattern.search(self.dockerfile)), "")


def _read_dockerfile(folder: Path) -> str:
    path = folder / "Dockerfile"
    if not path.is_file():
        raise SetupFailed(f"there is no Dockerfile in {folder}")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SetupFailed(f"{path} is a link that leaves its folder")
    return path.read_bytes().decode(errors="surrogateescape").removeprefix("\ufeff")


def _ignored(folder: Path) -> list[str]:
    path = folder / ".dockerignore"
    if not path.is_file():
        return []
    lines = (line.strip() for line in path.read_text(errors="surrogateescape").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _parts(folder: Path, files: tuple[str, ...], dockerfile: str) -> Iterator[bytes]:
    yield _SCHEME.encode()
    yield dockerfile.encode(errors="surrogateescape")
    for name in files:
        yield from entry_parts(folder, name)


def mark_layers(dockerfile: str) -> str:
    """The Dockerfile with our label after each FROM, so that every layer and build container inherits it.

    The label's value is always the same: layers stay shared between images that begin alike.
    """
    escape, marked = "\\", []
    inside = False  # an instruction that goes on
    is_from = False
    directives = True  # they are the first lines only
    for line in dockerfile.splitlines(keepends=True):
        text = line.strip()
        comment = text.startswith("#")
        if directives and (found := _ESCAPE.match(text)):
            escape = found[1]
        directives = directives and _DIRECTIVE.match(text) is not None
        marked.append(line)
        if comment or (inside and not text):
            continue
        if not inside:
            is_from = _FROM.match(line) is not None
        inside = text.endswith(escape)
        if is_from and not inside:
            marked[-1] = line.rstrip("\r\n") + f"\nLABEL {LAYER}=1\n"
            is_from = False
    return "".join(marked)
