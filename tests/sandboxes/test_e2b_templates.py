"""Templates from a task's Dockerfile: built once, named by content, with a log that tells what went wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import BoxSpec, Command, Limits, SandboxError, SetupFailed
from sandboxes.e2b_templates import template_name
from tests.sandboxes.e2b_opening import open_e2b
from tests.sandboxes.e2b_standin import Standin

DOCKERFILE = """\
FROM debian:bookworm
ENV COLOUR=blue
WORKDIR /srv/work
COPY data data
COPY --chmod=755 start.sh /opt/start.sh
RUN /opt/start.sh > made && id -un > who
"""


def environment(folder: Path, dockerfile: str = DOCKERFILE, data: str = "hello") -> BoxSpec:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text(data)
    (folder / "start.sh").write_text("#!/bin/sh\necho started\n")
    (folder / "Dockerfile").write_text(dockerfile)
    return BoxSpec("task", build_dir=folder, limits=Limits(deadline_s=300))


def builds(standin: Standin) -> int:
    return len(standin.templates.all) - 1


async def test_a_dockerfile_becomes_a_template(standin: Standin, tmp_path: Path) -> None:
    spec = environment(tmp_path / "environment")
    async with open_e2b(standin, tmp_path) as backend:
        await backend.prepare(spec)
        async with backend.sandbox(spec) as box:
            assert (box.workdir, box.user) == ("/srv/work", "user")
            result = await box.run(Command.shell("cat data/a.txt made who; echo $COLOUR; pwd"))
            assert result.stdout == "hellostarted\nroot\nblue\n/srv/work\n"
    assert builds(standin) == 1


@pytest.mark.parametrize(("user", "expected"), [("USER nobody\n", "nobody"), ("USER root\n", "user"), ("", "user")])
async def test_the_templates_own_user_unless_it_is_root(
    standin: Standin, tmp_path: Path, user: str, expected: str
) -> None:
    spec = environment(tmp_path / "environment", "FROM debian:bookworm\nRUN true\n" + user)
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(spec) as box:
            assert box.user == expected and box.workdir == "/app"


async def test_many_siblings_and_later_runs_share_one_build(standin: Standin, tmp_path: Path) -> None:
    first, second = environment(tmp_path / "a"), environment(tmp_path / "b")
    for _ in range(2):
        async with open_e2b(standin, tmp_path) as backend:
            await asyncio.gather(*(backend.prepare(spec) for spec in (first, second) for _ in range(4)))
    assert builds(standin) == 1


def test_the_name_says_what_is_inside(tmp_path: Path) -> None:
    spec = environment(tmp_path / "a")
    names = {template_name(spec), template_name(replace(spec, limits=Limits(memory_mb=512)))}
    names.add(template_name(environment(tmp_path / "b", data="other")))
    names.add(template_name(environment(tmp_path / "c", DOCKERFILE + "RUN true\n")))
    (tmp_path / "a" / "start.sh").chmod(0o755)
    names.add(template_name(spec))
    assert len(names) == 5
    assert template_name(environment(tmp_path / "d", data="other")) in names


async def test_size_is_the_builds(standin: Standin, tmp_path: Path) -> None:
    spec = replace(environment(tmp_path / "a"), limits=Limits(cpus=1.5, memory_mb=1001))
    async with open_e2b(standin, tmp_path) as backend:
        await backend.prepare(spec)
    body = list(standin.templates.all.values())[-1].body
    assert (body["cpuCount"], body["memoryMB"]) == (2, 1002)


async def test_a_step_that_fails_is_told_with_its_log(standin: Standin, tmp_path: Path) -> None:
    spec = environment(tmp_path / "a", "FROM debian:bookworm\nRUN echo about to fail && exit 3\n")
    async with open_e2b(standin, tmp_path) as backend:
        for _ in range(3):
            with pytest.raises(SetupFailed, match="exit status 3") as raised:
                await backend.prepare(spec)
        assert raised.value.log_path is not None and "\n" not in str(raised.value)
        assert "about to fail" in raised.value.log_path.read_text()
    assert builds(standin) == 1  # not again for each rollout


@pytest.mark.parametrize(
    ("dockerfile", "says"),
    [
        ("FROM a AS b\nRUN true\nFROM c\nCOPY --from=b /x /x\n", "[Mm]ulti-stage"),
        ("FROM a\nADD https://files.example/x.tar /x\n", "remote URL"),
        ("RUN true\n", "FROM"),
        ("", "FROM"),
    ],
)
async def test_what_the_builder_does_not_know_is_refused_with_a_way_out(
    standin: Standin, tmp_path: Path, dockerfile: str, says: str
) -> None:
    spec = environment(tmp_path / "a", dockerfile)
    async with open_e2b(standin, tmp_path) as backend:
        with pytest.raises(SetupFailed, match=says) as raised:
            await backend.prepare(spec)
    assert "`image` in task.toml" in str(raised.value)
    assert builds(standin) == 0


async def test_a_build_that_takes_too_long_is_given_up(standin: Standin, tmp_path: Path) -> None:
    standin.templates.hang = True
    spec = replace(environment(tmp_path / "a"), build_timeout_s=0.5)
    async with open_e2b(standin, tmp_path) as backend:
        with pytest.raises(SetupFailed, match=r"not built in 0.5 s"):
            await backend.prepare(spec)
    standin.templates.hang = False


async def test_trouble_of_the_service_is_not_the_tasks_fault(standin: Standin, tmp_path: Path) -> None:
    spec = environment(tmp_path / "a")
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("template", 500, 1)
        with pytest.raises(SandboxError) as raised:
            await backend.prepare(spec)
        assert not isinstance(raised.value, SetupFailed)
        await backend.prepare(spec)


async def test_a_template_that_vanished_is_built_again(standin: Standin, tmp_path: Path) -> None:
    spec = environment(tmp_path / "a")
    async with open_e2b(standin, tmp_path) as backend:
        await backend.prepare(spec)
        list(standin.templates.all.values())[-1].status = "error"
        with pytest.raises(SetupFailed):
            async with backend.sandbox(spec):
                pass
        async with backend.sandbox(spec) as box:
            assert (await box.run(Command(["true"]))).exit_code == 0


async def test_neither_image_nor_dockerfile(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path) as backend:
        with pytest.raises(SandboxError, match="no Dockerfile"):
            backend.check(BoxSpec("task", build_dir=tmp_path))
        backend.check(BoxSpec("task"))
        backend.check(BoxSpec("task", image="mine", build_dir=tmp_path))
