"""Agents that try to write their own reward: none of it ever counts, on any backend, whoever the agent runs as.

Each case runs a hostile agent for real and then scores it as a rollout does. An honest agent, scored the same way,
shows that a right answer would have counted. In containers, where a case mostly waits for Docker, several are under way
at once, as in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from harness_trainer.rewards.base import Code, VerifierResult, VerifyMode
from harness_trainer.rewards.verifier import verify
from sandboxes.base import Backend, BoxSpec, Command, Limits, Network, NetworkMode, SandboxError, SandboxGone
from tests.rewards import hostile
from tests.rewards.conftest import OpenBackend, OpenDocker

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def scored(
    backend: Backend, folder: Path, attack: str, spec: BoxSpec, mode: VerifyMode, *, upload: Path | None = None
) -> VerifierResult | None:
    """Run the agent and score it. None = its sandbox broke, which never becomes a reward."""
    task = hostile.honest_task(folder, box=spec)
    async with backend.sandbox(spec) as box:
        if upload is not None:
            await box.put_file(upload, "/app/evil.so")
        try:
            await box.run(Command(["sh", "-c", hostile.script(attack)], timeout_s=20.0))
            return await verify(
                task,
                box,
                backend=backend,
                mode=mode,
                final_message="1.0",
                registry=folder / "owned",
                keep=folder / "kept",
            )
        except SandboxError:
            return None


def boundless_spec() -> BoxSpec:
    return BoxSpec("tide", network=Network(NetworkMode.PUBLIC))


def docker_spec(user: str) -> BoxSpec:
    limits = Limits(memory_mb=512, processes=100, deadline_s=120.0)
    # What an image does that searches its user's own folder for programs first.
    env = {"PATH": f"/home/bin:{STANDARD_PATH}", "PYTHONPATH": "/home/lib", "LD_LIBRARY_PATH": "/usr/lib"}
    return BoxSpec("tide", user=user, env=env, limits=limits, network=Network(NetworkMode.NONE))


# Without a boundary a process that hides its environment is found by what it holds open, and one that forks at the
# right moment is not: seen once in many runs. The sandbox says that it is no boundary.
UNBOUND = [name for name in hostile.ATTACKS if name != "daemon without variables"]


@pytest.mark.parametrize("attack", UNBOUND)
async def test_no_attack_pays_in_the_local_sandbox(open_to: OpenBackend, tmp_path: Path, attack: str) -> None:
    async with open_to("local") as backend:
        result = await scored(backend, tmp_path, hostile.ATTACKS[attack], boundless_spec(), VerifyMode.AUTO)
    assert result is not None and result.mode is VerifyMode.SAME
    assert result.reward == 0.0, result


@pytest.mark.usefixtures("bubblewrap_works")
@pytest.mark.parametrize("attack", hostile.ATTACKS)
async def test_no_attack_pays_under_bubblewrap(open_to: OpenBackend, tmp_path: Path, attack: str) -> None:
    spec = BoxSpec("tide", network=Network(NetworkMode.NONE))
    async with open_to("bubblewrap") as backend:
        result = await scored(backend, tmp_path, hostile.ATTACKS[attack], spec, VerifyMode.AUTO)
    assert result is not None and result.reward == 0.0, result


UNPRIVILEGED = {**hostile.ATTACKS, **hostile.CONTAINED}
# A fresh container gets the workspace alone, so that what attacks from there is what matters, and a few of the others.
_FROM_THE_WORKSPACE = (
    "answer",
    "folder a link",
    "link",
    "workspace",
    "conftest",
    "modules",
    "programs",
    "git",
    "tests a",
)
_CHOSEN = {
    name: attack
    for name, attack in hostile.ATTACKS.items()
    if name.startswith(_FROM_THE_WORKSPACE) or name in ("reward.txt 1.0", "loop without variables", "daemon")
}
ROOT = {**_CHOSEN, **hostile.CONTAINED, **hostile.AS_ROOT}


_AT_ONCE = 3  # attacks in containers; each has limits of its own
Ended: TypeAlias = VerifierResult | BaseException | None
Scored: TypeAlias = Mapping[str, Ended]


def _each(
    request: pytest.FixtureRequest, test: str, attack_once: Callable[[str], Awaitable[VerifierResult | None]]
) -> Scored:
    """How the attacks that `test` is asked for in this session ended."""
    asked = [
        str(item.callspec.params["attack"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test and item.path == request.path
    ]

    async def at_once() -> Scored:
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(attack: str) -> VerifierResult | None:
            async with places:
                return await attack_once(attack)

        ended = await asyncio.gather(*map(one, asked), return_exceptions=True)
        return dict(zip(asked, ended, strict=True))

    with ThreadPoolExecutor(1) as thread:  # with an event loop of its own
        return thread.submit(lambda: asyncio.run(at_once())).result()


def _ended(attacks: Scored, attack: str) -> VerifierResult | None:
    result = attacks[attack]
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture(scope="module")
def ordinary_attacks(request: pytest.FixtureRequest, docker: OpenDocker) -> Scored:
    async def attack_once(attack: str) -> VerifierResult | None:
        folder, backend = docker()
        async with backend:
            return await scored(backend, folder, UNPRIVILEGED[attack], docker_spec("1000"), VerifyMode.AUTO)

    return _each(request, "test_no_attack_of_an_ordinary_user_pays_in_its_own_container", attack_once)


@pytest.mark.parametrize("attack", UNPRIVILEGED)
def test_no_attack_of_an_ordinary_user_pays_in_its_own_container(ordinary_attacks: Scored, attack: str) -> None:
    result = _ended(ordinary_attacks, attack)
    assert result is not None and result.mode is VerifyMode.SAME and result.reward == 0.0, result


@pytest.fixture(scope="module")
def attacks_of_root(request: pytest.FixtureRequest, docker: OpenDocker, evil_library: Path) -> Scored:
    async def attack_once(attack: str) -> VerifierResult | None:
        folder, backend = docker()
        async with backend:
            return await scored(
                backend, folder, ROOT[attack], docker_spec("root"), VerifyMode.AUTO, upload=evil_library
            )

    return _each(request, "test_no_attack_of_root_pays_in_a_fresh_container", attack_once)


@pytest.mark.parametrize("attack", ROOT)
def test_no_attack_of_root_pays_in_a_fresh_container(attacks_of_root: Scored, attack: str) -> None:
    result = _ended(attacks_of_root, attack)
    if result is not None:
        assert result.mode is VerifyMode.FRESH and result.reward in (0.0, None), result
    else:
        assert attack in ("no shell", "the shell itself", "full of processes"), "its sandbox should have lived"


@pytest.mark.parametrize("attack", ["every program", "system site", "preloaded library"])
async def test_root_can_prepare_its_own_container_which_is_why_it_is_not_tested_there_unasked(
    open_to: OpenBackend, tmp_path: Path, evil_library: Path, attack: str
) -> None:
    async with open_to("docker") as backend:
        result = await scored(
            backend, tmp_path, ROOT[attack], docker_spec("root"), VerifyMode.SAME, upload=evil_library
        )
    assert result is not None and result.reward == 1.0
    assert Code.NOT_SEPARATED in {finding.code for finding in result.findings}


KINDS = [
    ("local", boundless_spec(), VerifyMode.AUTO, VerifyMode.SAME),
    ("local", boundless_spec(), VerifyMode.FRESH, VerifyMode.FRESH),
    ("bubblewrap", BoxSpec("tide", network=Network(NetworkMode.NONE)), VerifyMode.SAME, VerifyMode.SAME),
    ("bubblewrap", BoxSpec("tide", network=Network(NetworkMode.NONE)), VerifyMode.FRESH, VerifyMode.FRESH),
    ("docker", docker_spec("1000"), VerifyMode.AUTO, VerifyMode.SAME),
    ("docker", docker_spec("1000"), VerifyMode.FRESH, VerifyMode.FRESH),
    ("docker", docker_spec("root"), VerifyMode.AUTO, VerifyMode.FRESH),
    ("docker", docker_spec("root"), VerifyMode.SAME, VerifyMode.SAME),
]


@pytest.mark.parametrize(("kind", "spec", "mode", "used"), KINDS)
async def test_an_honest_agent_scores_wherever_its_work_is_tested(
    open_to: OpenBackend,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
    spec: BoxSpec,
    mode: VerifyMode,
    used: VerifyMode,
) -> None:
    if kind == "bubblewrap":
        request.getfixturevalue("bubblewrap_works")
    async with open_to(kind) as backend:
        result = await scored(backend, tmp_path, hostile.HONEST, spec, mode)
    assert result is not None and (result.reward, result.mode) == (1.0, used), result
    assert result.rewards == {"reward": 1.0} and result.detail == "" and result.output == "checked\n"
    assert {"stop", "prepare", "tests"} <= result.stages_s.keys()
    assert ("copy" in result.stages_s) == (used is VerifyMode.FRESH)
    unseparated = kind != "local" and used is VerifyMode.SAME and spec.user != "1000"
    assert (Code.NOT_SEPARATED in {f.code for f in result.findings}) == unseparated


@pytest.mark.parametrize("user", ["1000", "root"])
async def test_tests_and_solution_are_nowhere_while_the_agent_works(
    open_to: OpenBackend, tmp_path: Path, user: str
) -> None:
    spec = docker_spec(user)
    task = hostile.honest_task(tmp_path, box=spec)
    look = (
        "ls /tests /solution /verifier; find / -xdev -name expected.txt;"
        f" grep -rs '{hostile.ANSWER}' /app /home /tmp /logs /opt /srv"
    )
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        before = await box.run(Command(["sh", "-c", look], timeout_s=30.0))
        assert before.stdout == "" and before.exit_code != 0, before
        assert (await verify(task, box, backend=backend, final_message=None, registry=tmp_path / "owned")).reward == 0.0


async def test_an_ordinary_agent_cannot_read_the_tests_even_afterwards(open_to: OpenBackend, tmp_path: Path) -> None:
    spec = docker_spec("1000")
    task = hostile.honest_task(tmp_path, box=spec)
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        result = await verify(task, box, backend=backend, final_message=None, registry=tmp_path / "owned")
        assert result.mode is VerifyMode.SAME
        after = await box.run(Command(["sh", "-c", "cat /tests/*; ls /verifier; echo 1 > /logs/verifier/reward.txt"]))
        assert after.stdout == "" and after.exit_code != 0, after


async def test_a_sandbox_that_vanished_before_its_scoring_is_an_error_and_no_reward(
    open_to: OpenBackend, tmp_path: Path
) -> None:
    async with open_to("docker") as backend:
        for user in ("1000", "root"):
            spec = docker_spec(user)
            task = hostile.honest_task(tmp_path, box=spec)
            async with backend.sandbox(spec) as box:
                await box.stop()
                with pytest.raises(SandboxGone):
                    await verify(task, box, backend=backend, final_message=None, registry=tmp_path / "owned")
    assert list((tmp_path / "owned").glob("workspace-*")) == []
