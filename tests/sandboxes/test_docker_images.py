"""Images on a real engine: built once, cached by content, and nothing left of a build that fails or is ended."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import docker
import pytest
from engine_state import layers, opened

from sandboxes.base import BoxSpec, SandboxError, SetupFailed
from sandboxes.docker_images import REPOSITORY, Images, remove_unused
from sandboxes.docker_labels import BUILD, BUILT_FOR, CONTENT, LAYER, labels_of
from sandboxes.docker_reaping import sweep
from sandboxes.ownership import claim

MakeImages = Callable[..., Images]


@pytest.fixture
def api(docker_engine: str) -> Iterator[docker.APIClient]:
    with opened(docker_engine) as client:
        yield client


@pytest.fixture
def word(api: docker.APIClient) -> Iterator[str]:
    """Unique to the test: makes its steps uncached, and finds its layers. Its images are removed afterwards."""
    made = os.urandom(6).hex()
    yield made
    for image in api.images(filters={"label": [LAYER]}):
        if made in str(api.history(image["Id"])):
            api.remove_image(image["Id"], force=True)
    assert layers(api, made) == []


@pytest.fixture
def folder(tmp_path: Path, docker_base_image: str, word: str) -> Path:
    made = tmp_path / "environment"
    made.mkdir()
    (made / "file").write_text("hello")
    write(made, f"FROM {docker_base_image}", "WORKDIR /app", f"RUN echo {word} | tee word", "COPY file .")
    return made


def write(folder: Path, *lines: str) -> None:
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")


@pytest.fixture
async def make(docker_engine: str, registry: Path, tmp_path: Path) -> AsyncIterator[MakeImages]:
    made: list[Images] = []

    def make(address: str = docker_engine, **options: object) -> Images:
        settings = {"cache": tmp_path / "cache", "logs": tmp_path / "logs", **options}
        made.append(Images(address, registry=registry, run_id="test", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for images in made:
        await images.close()
    assert records(registry) == [], "a build that ended is off the record"


def records(registry: Path) -> list[Path]:
    return list(registry.glob("*"))


def spec(folder: Path, **options: object) -> BoxSpec:
    return BoxSpec("a task/with: odd name", build_dir=folder, **options)  # type: ignore[arg-type]


def runs(tmp_path: Path, output: str) -> int:
    """How often a step with this output really ran, in all builds so far."""
    return sum(log.read_text().splitlines().count(output) for log in (tmp_path / "logs").rglob("*.log"))


async def test_64_siblings_and_a_later_run_share_one_build(
    api: docker.APIClient, make: MakeImages, folder: Path, tmp_path: Path, word: str
) -> None:
    images = make()
    ids = await asyncio.gather(*(images.ensure(spec(folder), "unused") for _ in range(64)))
    assert len(set(ids)) == 1 and runs(tmp_path, word) == 1
    (log,) = (tmp_path / "logs").iterdir()
    assert word in log.read_text() and log.name.startswith("a-task-with-odd-name-")
    before = log.stat().st_mtime_ns
    assert await make().ensure(spec(folder), "unused") == ids[0]
    assert log.stat().st_mtime_ns == before
    config = api.inspect_image(ids[0])["Config"]
    assert config["Labels"][BUILT_FOR] == "a task/with: odd name" and config["WorkingDir"] == "/app"
    assert api.inspect_image(ids[0])["RepoTags"] == [f"{REPOSITORY}:{config['Labels'][CONTENT][:32]}"]
    assert not [line for line in layers(api, word) if line.startswith("container")]


async def test_two_runs_at_the_same_time_build_it_once(
    make: MakeImages, folder: Path, tmp_path: Path, word: str
) -> None:
    one, other = make(logs=tmp_path / "logs" / "1"), make(logs=tmp_path / "logs" / "2")
    ids = await asyncio.gather(one.ensure(spec(folder), ""), other.ensure(spec(folder), ""))
    assert ids[0] == ids[1]
    assert runs(tmp_path, word) == 1


async def test_a_changed_folder_is_another_image_that_shares_the_first_layers(
    make: MakeImages, folder: Path, tmp_path: Path, word: str
) -> None:
    first = await make().ensure(spec(folder), "")
    (folder / "file").write_text("changed")
    second = await make().ensure(spec(folder), "")
    assert first != second and runs(tmp_path, word) == 1


async def test_a_failing_build_is_told_once_with_its_log_and_leaves_nothing(
    api: docker.APIClient, make: MakeImages, folder: Path, tmp_path: Path, word: str, docker_base_image: str
) -> None:
    write(
        folder,
        f"FROM {docker_base_image}",
        f"RUN echo {word} && touch /made",
        f"RUN echo no {word}; exit 3",
        "RUN true",
    )
    images = make()
    failures = await asyncio.gather(*(images.ensure(spec(folder), "") for _ in range(8)), return_exceptions=True)
    for failure in failures:
        assert isinstance(failure, SetupFailed) and "returned a non-zero code: 3" in str(failure)
        assert failure.log_path is not None and f"no {word}" in failure.log_path.read_text()
    assert runs(tmp_path, f"no {word}") == 1
    failures[0].log_path.unlink()  # type: ignore[union-attr]
    with pytest.raises(SetupFailed, match="non-zero code: 3"):
        await images.ensure(spec(folder), "")
    assert runs(tmp_path, f"no {word}") == 0, "remembered, not built again"
    assert layers(api, word) == []


async def test_the_time_limit_ends_the_build_in_the_engine(
    api: docker.APIClient, make: MakeImages, folder: Path, word: str, docker_base_image: str
) -> None:
    write(
        folder,
        f"FROM {docker_base_image}",
        f"RUN echo {word}",
        f"RUN trap '' TERM; echo {word}; while :; do sleep 1; done",
    )
    began = time.monotonic()
    with pytest.raises(SetupFailed, match="took longer than 2 s and was ended"):
        await make().ensure(spec(folder, build_timeout_s=2.0), "")
    assert time.monotonic() - began < 12
    assert layers(api, word) == []


async def test_closing_ends_a_build_that_nobody_waits_for(
    api: docker.APIClient, make: MakeImages, folder: Path, tmp_path: Path, word: str, docker_base_image: str
) -> None:
    write(folder, f"FROM {docker_base_image}", f"RUN echo {word}", f"RUN echo started {word}; sleep 300")
    images = make()
    asking = [asyncio.create_task(images.ensure(spec(folder), "")) for _ in range(2)]
    await running(tmp_path, f"started {word}\n")
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    assert not asking[1].done(), "one sibling's end is not the others'"
    await images.close()
    with pytest.raises(SandboxError, match="ending"):
        await asking[1]
    assert layers(api, word) == []


async def running(tmp_path: Path, text: str) -> None:
    """Until a build's log holds the text as a line of output."""
    async with asyncio.timeout(30):
        while not any(f"\n{text}" in log.read_text() for log in (tmp_path / "logs").glob("*.log")):
            await asyncio.sleep(0.05)


async def test_a_failing_build_does_not_take_away_the_layers_a_live_one_stands_on(
    api: docker.APIClient, make: MakeImages, folder: Path, tmp_path: Path, word: str, docker_base_image: str
) -> None:
    start = [f"FROM {docker_base_image}", f"RUN echo shared {word}"]
    write(folder, *start, f"RUN echo started {word}; sleep 6", "RUN true")
    other = tmp_path / "other"
    other.mkdir()
    write(other, *start, f"RUN echo own-{word}", "RUN exit 1")
    slow = asyncio.create_task(make().ensure(spec(folder), ""))
    await running(tmp_path, f"started {word}\n")
    with pytest.raises(SetupFailed):
        await make().ensure(spec(other), "")
    assert not slow.done() and layers(api, f"own-{word}") == [], "but its own go at once"
    assert (await slow).startswith("sha256:")


async def test_stages_of_a_finished_image_are_not_left_behind(
    api: docker.APIClient, make: MakeImages, folder: Path, word: str, docker_base_image: str
) -> None:
    write(
        folder,
        f"FROM {docker_base_image} AS first",
        f"RUN echo stage-{word} > /made",
        f"FROM {docker_base_image}",
        "COPY --from=first /made /made",
        f"LABEL word={word}",
    )
    made = await make().ensure(spec(folder), "")
    assert api.inspect_image(made)
    assert layers(api, f"stage-{word}") == []


@pytest.mark.parametrize(
    "line",
    [
        "RUN --mount=type=cache,target=/c true",
        "COPY --chmod=755 file /f",
        "COPY --link file /f",
        "RUN <<EOF\necho hi\nEOF",
        "COPY <<EOF /f\nhi\nEOF",
    ],
)
async def test_what_only_buildkit_understands_is_named(
    make: MakeImages, folder: Path, docker_base_image: str, line: str
) -> None:
    write(folder, f"FROM {docker_base_image}", line)
    with pytest.raises(SetupFailed, match="only BuildKit understands.*docker build -t NAME"):
        await make().ensure(spec(folder), "")


async def test_an_image_by_name_is_taken_as_it_is_and_wins_over_the_folder(
    api: docker.APIClient, make: MakeImages, folder: Path, docker_base_image: str, tmp_path: Path, word: str
) -> None:
    expected = api.inspect_image(docker_base_image)["Id"]
    assert await make().ensure(BoxSpec("x"), docker_base_image) == expected
    assert await make().ensure(spec(folder, image=docker_base_image), "none") == expected
    assert runs(tmp_path, word) == 0


@pytest.mark.parametrize(
    "name", ["localhost:1/no/such:thing", "localhost:1/no/such@sha256:" + "0" * 64, "Not An Image"]
)
async def test_an_image_that_cannot_be_had_says_so(make: MakeImages, name: str) -> None:
    with pytest.raises(SetupFailed, match="cannot be pulled") as failure:
        await make().ensure(BoxSpec("x", image=name), "")
    assert name in str(failure.value) and "\n" not in str(failure.value)


async def test_a_base_image_that_is_nowhere_fails_with_the_engines_words(make: MakeImages, folder: Path) -> None:
    write(folder, "FROM localhost:1/no/such:thing")
    with pytest.raises(SetupFailed, match="localhost:1"):
        await make().ensure(spec(folder), "")


async def test_a_dead_engine_is_the_sandboxes_failure_and_is_asked_again(
    make: MakeImages, folder: Path, tmp_path: Path
) -> None:
    images = make(f"unix://{tmp_path}/no.sock")
    for _ in range(2):
        with pytest.raises(SandboxError, match="nobody listens") as failure:
            await images.ensure(spec(folder), "")
        assert not isinstance(failure.value, SetupFailed)


async def test_a_forgotten_image_is_looked_for_again(api: docker.APIClient, make: MakeImages, folder: Path) -> None:
    images = make()
    first = await images.ensure(spec(folder), "")
    api.remove_image(first, force=True)
    images.forget(first)
    assert api.inspect_image(await images.ensure(spec(folder), ""))


async def test_only_images_that_nobody_used_for_long_are_removed(
    api: docker.APIClient, make: MakeImages, folder: Path, tmp_path: Path, docker_engine: str
) -> None:
    cache = tmp_path / "cache"
    made = await make().ensure(spec(folder), "")
    (tag,) = api.inspect_image(made)["RepoTags"]
    assert tag not in remove_unused(docker_engine, days=1, cache=cache, dry_run=True)
    (note,) = (cache / "used").iterdir()
    os.utime(note, (0, time.time() - 2 * 86400))
    container = api.create_container(made, ["true"])["Id"]
    assert tag not in remove_unused(docker_engine, days=1, cache=cache, dry_run=True), "a container stands on it"
    api.remove_container(container)
    assert tag in remove_unused(docker_engine, days=1, cache=cache, dry_run=True)
    assert api.inspect_image(tag), "a dry run removes nothing"
    assert await make().ensure(spec(folder), "") == made
    assert tag not in remove_unused(docker_engine, days=1, cache=cache, dry_run=True), "used again just now"


def swept(engine: str, done: Callable[[], bool]) -> bool:
    """Sweep until `done`; a sweep leaves layers alone while any run on the engine builds."""
    for _ in range(100):
        sweep(engine)
        if done():
            return True
        time.sleep(0.2)
    return False


async def test_what_people_make_of_a_built_image_is_theirs(
    api: docker.APIClient, make: MakeImages, folder: Path, docker_engine: str
) -> None:
    made = await make().ensure(spec(folder), "")
    theirs = api.create_container(made, ["true"])["Id"]
    kept = api.commit(theirs)["Id"]  # untagged, with all labels of the image
    try:
        await asyncio.to_thread(sweep, docker_engine)
        assert api.inspect_container(theirs) and api.inspect_image(kept)
    finally:
        api.remove_container(theirs)
        api.remove_image(kept)


def test_layers_that_nobody_makes_any_more_are_swept_unless_some_build_is_going_on(
    api: docker.APIClient, word: str, docker_engine: str, docker_base_image: str, registry: Path
) -> None:
    dockerfile = io.BytesIO(f"FROM {docker_base_image}\nLABEL {LAYER}=1\nRUN echo {word}\n".encode())
    for message in api.build(fileobj=dockerfile, rm=True, decode=True):  # as a cut build leaves it: without a tag
        assert "error" not in message
    building = claim(registry, "image_build", run_id="test")
    api.create_volume(building.id, labels=labels_of(building, BUILD))
    try:
        assert layers(api, word)
        sweep(docker_engine)
        assert layers(api, word), "it may be the layer that a build stands on this moment"
    finally:
        api.remove_volume(building.id)
    assert swept(docker_engine, lambda: layers(api, word) == [])
