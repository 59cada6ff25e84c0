"""Scoring: what the tests see, what counts as their word, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.errors import TaskError
from harness_trainer.rewards.base import Code, VerifierResult, VerifyMode
from harness_trainer.rewards.verifier import Caps, verify
from harness_trainer.tasks import Artifact, Task, load_tasks
from sandboxes.base import Backend, BoxSpec, Command, Limits, Network, NetworkMode, Sandbox, SandboxError
from sandboxes.processes import Traces, find_all
from tests.rewards.conftest import OpenBackend

LOCAL = BoxSpec("t", network=Network(NetworkMode.PUBLIC))
# What an honest verifier of an agent that did nothing does.
FAIL = 'echo checked; echo 0 > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"'


@dataclass
class Bench:
    """A started sandbox and how to score it."""

    backend: Backend
    box: Sandbox
    spec: BoxSpec
    registry: Path

    async def agent(self, script: str) -> None:
        prelude = 'R=${SANDBOX_ROOT:-}; V="$R/logs/verifier"; T="$R/tests"; '
        result = await self.box.run(Command(["sh", "-c", prelude + script], timeout_s=20))
        assert result.exit_code == 0, result

    async def score(self, script: str, final_message: str | None = "done", **fields: Any) -> VerifierResult:
        return await self.verify(task(script, **fields), final_message=final_message)

    async def verify(self, task: Task, final_message: str | None = None, **options: Any) -> VerifierResult:
        return await verify(
            task,
            self.box,
            backend=self.backend,
            spec=self.spec,
            final_message=final_message,
            registry=self.registry,
            **options,
        )


def task(script: str, **fields: Any) -> Task:
    return Task("t", Path("t"), "do", verify_script=script, **fields)


@pytest.fixture
async def bench(open_to: OpenBackend, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_to("local") as backend, backend.sandbox(LOCAL) as box:
        yield Bench(backend, box, LOCAL, tmp_path / "owned")


@pytest.fixture(params=["same", "fresh"])
async def docker_bench(open_to: OpenBackend, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    user = "1000" if request.param == "same" else "root"
    limits = Limits(memory_mb=256, processes=100, deadline_s=120.0)
    spec = BoxSpec("t", user=user, limits=limits, network=Network(NetworkMode.NONE))
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        yield Bench(backend, box, spec, tmp_path / "owned")


PLANTS = {
    "sitecustomize.py": "raise SystemExit(0)",
    "usercustomize.py": "raise SystemExit(0)",
    "os.py": "raise SystemExit(0)",
    "pathlib.py": "raise SystemExit(0)",
    "conftest.py": "raise SystemExit(0)",
    "python3": "#!/bin/sh\necho 1 > $SANDBOX_ROOT/logs/verifier/reward.txt\n",
    "bash": "#!/bin/sh\necho 1 > $SANDBOX_ROOT/logs/verifier/reward.txt\n",
}


@pytest.mark.parametrize(
    "where", ["/app", "/home", "/home/.local/bin", "/home/.local/lib/python3.11/site-packages", "/tmp"]
)
async def test_planted_modules_and_programs_do_not_score_an_example_task(bench: Bench, where: str) -> None:
    for name, text in PLANTS.items():
        await bench.box.put_text(text, f"{where}/{name}", 0o755)
    result = await bench.verify(load_tasks("short-reply")[0], final_message="")
    assert result.reward == 0.0, result


async def test_a_symlinked_answer_is_not_read(bench: Bench) -> None:
    await bench.agent("printf 'The sea is wide and calm and its waves sing me softly home.' > x; ln -s x answer.txt")
    assert (await bench.verify(load_tasks("short-reply")[0])).reward == 0.0


async def test_tests_are_absent_while_the_agent_works(bench: Bench) -> None:
    assert (await bench.box.run(Command(["ls", bench.box.resolve("/tests")]))).exit_code != 0


SCRIPTS: list[tuple[str, float | None, Code | None]] = [
    ("echo 0.5 > $R.txt; exit 1", 0.5, None),  # as in Harbor, the exit code does not count
    ("echo 0.5 > $R.txt; echo '{\"reward\": 0.75}' > $R.json", 0.75, None),
    ("echo 1.5 > $R.txt", None, Code.REWARD_OUT_OF_RANGE),
    ("echo nan > $R.txt", None, Code.REWARD_NOT_FINITE),
    ("echo 1.0 extra > $R.txt", None, Code.REWARD_UNREADABLE),
    ("printf '1%20000s' > $R.txt", None, Code.REWARD_UNREADABLE),
    ("touch $R.txt", None, Code.REWARD_MISSING),
    ("echo 1 > $TMPDIR/x; ln -s $TMPDIR/x $R.txt", None, Code.REWARD_MISSING),
    ("mkdir $R.txt; mkfifo $R.json", None, Code.REWARD_MISSING),
    ("kill -9 $$", None, Code.REWARD_MISSING),
    ("exit 0", None, Code.REWARD_MISSING),
    ("(sleep 0.3; echo 1 > $R.txt) & echo 0.25 > $R.txt", 0.25, None),
    ('test "$MODE" = strict && echo 1 > $R.txt', 1.0, None),
]


@pytest.mark.parametrize(("script", "reward", "code"), SCRIPTS)
async def test_what_the_verifier_writes_is_the_reward(
    bench: Bench, script: str, reward: float | None, code: Code | None
) -> None:
    result = await bench.score(f"R=$SANDBOX_ROOT/logs/verifier/reward; {script}", env_vars={"MODE": "strict"})
    assert result.reward == reward, result
    assert (result.detail == "") == (reward is not None)
    assert [finding.code for finding in result.findings] == ([] if code is None else [code])


async def test_the_tests_run_in_the_workspace_with_folders_of_their_own(bench: Bench) -> None:
    script = (
        "test -f $TESTS_DIR/test.sh && test $PWD = $SANDBOX_ROOT/app && ! ls -A $HOME | grep . &&"
        " ! ls -A $TMPDIR | grep . && echo 1 > $SANDBOX_ROOT/logs/verifier/reward.txt"
    )
    await bench.agent("touch $HOME/.bashrc $TMPDIR/x")
    assert (await bench.score(script)).reward == 1.0


async def test_named_rewards_are_returned_and_their_weights_make_the_one_to_train_on(bench: Bench) -> None:
    script = 'echo \'{"tests": 1, "style": 0.5, "seconds": 70}\' > $SANDBOX_ROOT/logs/verifier/reward.json'
    result = await bench.score(script, metadata={"reward_weights": {"tests": 0.8, "style": 0.2}})
    assert result.reward == pytest.approx(0.9)
    assert result.rewards == {"tests": 1.0, "style": 0.5, "seconds": 70.0}
    unweighted = await bench.score(script)
    assert (unweighted.reward, unweighted.rewards) == (None, {})
    assert [finding.code for finding in unweighted.findings] == [Code.REWARD_AMBIGUOUS]


async def test_a_time_out_is_no_reward_even_when_one_was_written(bench: Bench) -> None:
    script = "echo 1 > $SANDBOX_ROOT/logs/verifier/reward.txt; echo working; setsid sleep 300 & sleep 300"
    result = await bench.score(script, verifier_timeout_s=0.3)
    assert result.reward is None and result.timed_out and result.output == "working\n" and result.exit_code is None
    assert "did not end" in result.detail and [f.code for f in result.findings] == [Code.VERIFIER_TIMEOUT]
    assert find_all(bench.box.sandbox_id, Traces()) == []


@pytest.mark.parametrize(("message", "size"), [("hé\n", 4), (None, 0)])
async def test_the_final_message_is_there_for_the_tests(bench: Bench, message: str | None, size: int) -> None:
    await bench.agent("ln -s /etc/passwd $R/logs/agent/final_message.txt")
    script = 'wc -c < "$SANDBOX_ROOT/logs/agent/final_message.txt"; echo 1 > $SANDBOX_ROOT/logs/verifier/reward.txt'
    result = await bench.score(script, message)
    assert int(result.output) == size and result.reward == 1.0


async def test_keys_of_the_parent_reach_a_verifier_only_when_its_task_asks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    assert "hunter2" not in (await bench.score("env")).output
    assert "K=hunter2" in (await bench.score("env", env_vars={"K": "${JUDGE_KEY}"})).output
    with pytest.raises(TaskError, match="export NOPE="):
        await bench.score("env", env_vars={"K": "${NOPE}"})


async def test_a_sandbox_that_is_gone_is_an_error_and_no_reward(bench: Bench) -> None:
    await bench.box.stop()
    with pytest.raises(SandboxError):
        await bench.score(FAIL)


async def test_long_output_of_the_tests_is_bounded(bench: Bench) -> None:
    result = await bench.score(f"head -c 3000000 /dev/zero | tr '\\0' x; {FAIL}")
    assert result.reward == 0.0 and len(result.output) < 110_000
    assert result.output.endswith("checked\n")


# --- where the tests run -------------------------------------------------------------------------------------------

COPIED = {
    "file": 'echo hi > a; test "$(cat a)" = hi',
    "program": "printf '#!/bin/sh\\nexit 0\\n' > a; chmod 750 a; ./a",
    "deep folder": "mkdir -p a/b/c; echo x > a/b/c/d; test -f a/b/c/d",
    "empty folder": "mkdir a; test -d a",
    "inner link": "echo x > a; ln -s a b; mkdir d; ln -s ../a d/e; test -L b && cmp b d/e",
    "link to what the image has": "ln -s /bin/sh a; ./a -c true",
    "odd names": "echo x > 'a b'; echo x > -n; echo x > 'é'; test -f 'a b' && test -f ./-n && test -f 'é'",
}


@pytest.mark.parametrize("what", COPIED)
async def test_a_fresh_sandbox_gets_the_workspace_as_it_was(bench: Bench, what: str) -> None:
    made, _, check = COPIED[what].rpartition("; ")
    await bench.agent(made)
    script = f"if {check}; then echo 1; else ls -la; echo 0; fi > $SANDBOX_ROOT/logs/verifier/reward.txt"
    result = await bench.verify(task(script), mode=VerifyMode.FRESH)
    assert (result.reward, result.mode, result.findings) == (1.0, VerifyMode.FRESH, ()), result


async def test_a_fresh_sandbox_gets_what_was_removed_as_removed_and_nothing_from_elsewhere(bench: Bench) -> None:
    await bench.agent(
        "echo x > $R/home/x; echo x > $R/tmp/x; echo x > $R/logs/artifacts/kept; ln -s /nowhere gone; mkfifo p"
    )
    script = (
        "ls -A . $SANDBOX_ROOT/home $SANDBOX_ROOT/tmp | grep -v :; cat $SANDBOX_ROOT/logs/artifacts/kept;"
        " echo 1 > $SANDBOX_ROOT/logs/verifier/reward.txt"
    )
    result = await bench.verify(task(script), mode=VerifyMode.FRESH)
    assert result.reward == 1.0 and result.output.split() == ["x"], result
    assert Code.ENTRY_DROPPED in {finding.code for finding in result.findings}


async def test_declared_artifacts_reach_a_fresh_sandbox_too(bench: Bench) -> None:
    await bench.agent("mkdir -p $R/out/d; echo 0.25 > $R/out/d/score; echo 1 > $R/single")
    script = "cat $SANDBOX_ROOT/out/d/score > $SANDBOX_ROOT/logs/verifier/reward.txt; cat $SANDBOX_ROOT/single"
    declared = (Artifact("/out"), Artifact("/single"), Artifact("/absent"))
    result = await bench.verify(task(script, artifacts=declared), mode=VerifyMode.FRESH)
    assert result.reward == 0.25 and result.output == "1\n", result


async def test_a_workspace_above_the_cap_is_not_copied_and_not_scored(bench: Bench) -> None:
    await bench.agent("head -c 3000000 /dev/zero > big")
    result = await bench.verify(task(FAIL), mode=VerifyMode.FRESH, caps=Caps(workspace=1_000_000))
    assert result.reward is None and [f.code for f in result.findings] == [Code.WORKSPACE_TOO_LARGE]
    assert "1 MB" in result.detail and list(bench.registry.glob("workspace-*")) == []


@pytest.mark.parametrize(
    ("asked", "fields", "used"),
    [
        (VerifyMode.AUTO, {}, VerifyMode.SAME),
        (VerifyMode.AUTO, {"metadata": {"verify": "fresh"}}, VerifyMode.FRESH),
        (VerifyMode.SAME, {"metadata": {"verify": "fresh"}}, VerifyMode.SAME),
        (VerifyMode.FRESH, {"metadata": {"verify": "same"}}, VerifyMode.FRESH),
        (VerifyMode.SAME, {"verifier_fresh": True}, VerifyMode.FRESH),
    ],
)
async def test_the_task_may_decide_what_the_run_leaves_open(
    bench: Bench, asked: VerifyMode, fields: dict[str, Any], used: VerifyMode
) -> None:
    result = await bench.verify(task(FAIL, **fields), mode=asked)
    assert (result.mode, result.reward) == (used, 0.0)


# --- in containers -------------------------------------------------------------------------------------------------


async def test_tests_run_as_root_and_their_folders_are_closed_to_the_agents_user(docker_bench: Bench) -> None:
    script = "id -u; stat -c '%u %a' /tests /logs/verifier /verifier; ls /tests; echo 1 > /logs/verifier/reward.txt"
    result = await docker_bench.score(script)
    assert result.output.split() == ["0", *["0", "700"] * 3, "test.sh"], result
    assert result.reward == 1.0


async def test_tests_run_as_the_user_that_the_task_names(docker_bench: Bench) -> None:
    script = "id -un; touch $HOME/x $TMPDIR/x && cat /tests/test.sh > /dev/null && echo 1 > /logs/verifier/reward.txt"
    result = await docker_bench.score(script, verifier_user="nobody")
    assert (result.output, result.reward) == ("nobody\n", 1.0), result


async def test_a_task_whose_tests_run_as_the_agents_own_user_gets_a_fresh_container(
    open_to: OpenBackend, tmp_path: Path
) -> None:
    spec = BoxSpec("t", user="nobody", network=Network(NetworkMode.NONE))
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        bench = Bench(backend, box, spec, tmp_path / "owned")
        result = await bench.score(FAIL, verifier_user="nobody")
        assert (result.mode, result.reward) == (VerifyMode.FRESH, 0.0)
        asked = await bench.verify(task(FAIL, verifier_user="nobody"), mode=VerifyMode.SAME)
        assert Code.NOT_SEPARATED in {finding.code for finding in asked.findings}


@pytest.mark.parametrize(
    "script", ["python3 -c 'x = bytearray(2 ** 30)'", "python3 -c 'x = bytearray(2 ** 30)' || true"]
)
async def test_tests_that_run_out_of_memory_give_no_reward(docker_bench: Bench, script: str) -> None:
    result = await docker_bench.score(f"{script}; echo 0 > /logs/verifier/reward.txt")
    assert result.reward is None and result.oom and "memory" in result.detail, result
    assert Code.VERIFIER_OOM in {finding.code for finding in result.findings}


async def test_a_search_path_that_the_agent_can_write_to_is_not_used_and_said_so(
    open_to: OpenBackend, tmp_path: Path
) -> None:
    path = "/app/bin:/usr/local/bin:/usr/bin:/bin:relative"
    for user in ("1000", "root"):
        env = {"PATH": path, "PYTHONPATH": "/app/lib:/usr/lib/python3"}
        spec = BoxSpec("t", user=user, env=env, network=Network(NetworkMode.NONE))
        async with open_to("docker") as backend, backend.sandbox(spec) as box:
            bench = Bench(backend, box, spec, tmp_path / "owned")
            await bench.agent("mkdir -p bin; printf '#!/bin/sh\\necho planted\\n' > bin/tool; chmod 755 bin/tool")
            script = "echo $PATH $PYTHONPATH; command -v tool; echo 1 > /logs/verifier/reward.txt"
            result = await bench.score(script)
            assert result.output.split() == ["/usr/local/bin:/usr/bin:/bin", "/usr/lib/python3"], result
            (finding,) = result.findings
            assert finding.code is Code.PATH_DROPPED and "PATH /app/bin" in finding.detail
            asked = await bench.score(script, env_vars={"PATH": path})
            assert asked.output.split() == [path, "/usr/lib/python3", "/app/bin/tool"]


async def test_a_fresh_container_has_no_network_unless_the_tests_ask(open_to: OpenBackend, tmp_path: Path) -> None:
    spec = BoxSpec("t", user="root", network=Network(NetworkMode.NONE))
    script = "ls /sys/class/net; echo 1 > /logs/verifier/reward.txt"
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        bench = Bench(backend, box, spec, tmp_path / "owned")
        assert (await bench.score(script)).output.split() == ["lo"]
        asked = await bench.score(script, verifier_network=Network(NetworkMode.PUBLIC))
        assert "eth0" in asked.output.split(), asked


async def test_tests_that_ask_for_a_network_get_a_fresh_container_when_the_agents_has_none(
    open_to: OpenBackend, tmp_path: Path
) -> None:
    spec = BoxSpec("t", user="1000", network=Network(NetworkMode.NONE))
    script = "ls /sys/class/net; echo 1 > /logs/verifier/reward.txt"
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        bench = Bench(backend, box, spec, tmp_path / "owned")
        asking = task(script, verifier_network=Network(NetworkMode.PUBLIC))
        fresh = await bench.verify(asking)
        assert fresh.mode is VerifyMode.FRESH and "eth0" in fresh.output.split(), fresh
        same = await bench.verify(asking, mode=VerifyMode.SAME)
        assert same.output.split() == ["lo"] and [f.code for f in same.findings] == [Code.NOT_CONNECTED], same


async def test_a_container_that_is_lost_while_the_tests_run_is_an_error_and_no_reward(
    open_to: OpenBackend, docker_engine: str, tmp_path: Path
) -> None:
    import docker

    spec = BoxSpec("t", user="1000", network=Network(NetworkMode.NONE))
    script = "echo 1 > /logs/verifier/reward.txt; touch /logs/verifier/started; sleep 60"
    async with open_to("docker") as backend, backend.sandbox(spec) as box:
        bench = Bench(backend, box, spec, tmp_path / "owned")
        scoring = asyncio.create_task(bench.score(script))
        while await box.get_text("/logs/verifier/started") is None:
            await asyncio.sleep(0.05)
        client = docker.DockerClient(base_url=docker_engine)
        await asyncio.to_thread(client.api.remove_container, box.sandbox_id, force=True, v=True)
        client.close()
        with pytest.raises(SandboxError):
            await asyncio.wait_for(scoring, 30)


async def test_logs_and_artifacts_are_kept_within_a_cap_and_nothing_outside_is_read(
    docker_bench: Bench, tmp_path: Path
) -> None:
    await docker_bench.agent(
        "mkdir -p out/tmp; echo 1 > out/a; echo 1 > out/tmp/b; echo 1 > out/c.log; ln -s /etc/passwd out/p;"
        " ln -s /etc /logs/artifacts/etc; echo x > /logs/artifacts/x; head -c 3000000 /dev/zero > big"
    )
    declared = (Artifact("out", exclude=("tmp", "*.log")), Artifact("/app/big", destination="large/big"))
    script = (
        "echo log > /logs/verifier/ctrf.json; ln -s /etc/passwd /logs/verifier/p; echo 1 > /logs/verifier/reward.txt"
    )
    kept = tmp_path / "kept"
    result = await docker_bench.verify(task(script, artifacts=declared), keep=kept, caps=Caps(kept=1_000_000))
    files = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if not path.is_dir()}
    assert files == {"verifier/ctrf.json", "verifier/reward.txt", "artifacts/app/out/a", "artifacts/logs/artifacts/x"}
    assert result.reward == 1.0
    assert [f.detail for f in result.findings if f.code is Code.FILES_NOT_KEPT] == ["/app/big holds more than 1 MB"]


async def test_servers_and_jobs_of_the_agent_are_ended_before_the_tests_run(docker_bench: Bench) -> None:
    await docker_bench.box.start_job(Command(["sleep", "300"]))
    await docker_bench.agent("setsid sleep 301 > /dev/null 2>&1 &")
    script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo 1 > /logs/verifier/reward.txt"
    result = await docker_bench.score(script)
    assert result.reward == 1.0 and "sleep 30" not in result.output, result
