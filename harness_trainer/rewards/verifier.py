"""Runs a task's own tests on what the agent has left, and reads the reward they write.

Owns the order that keeps the agent's hands off its reward: end the agent's processes, make the tests' folders anew,
only then bring the tests in, read the result without following links. `guard` cleans variables and links, `workspace`
copies. Called once per rollout by `rollouts`, and by `tasks check`.

Where (`VerifyMode`): *same* = the agent's own sandbox, as root or the task's [verifier] user, which the agent's user
cannot touch; *fresh* = a new sandbox from the same image, without network unless [verifier] asks, into which the
working directory and the artifacts are copied. What an agent changed elsewhere (installed programs, files in /etc) is
not there in a fresh sandbox; a task about such things says `verify = "same"` in [metadata], or names artifacts.

As in Harbor: tests are copied to /tests and `test.sh` runs in the working directory; its exit code does not matter,
what it writes to /logs/verifier/reward.json or (when that is absent) reward.txt does. Unlike Harbor: servers that the
agent started are ended, HOME and TMPDIR are fresh folders (an agent can plant start-up files in its own; a task that
needs another HOME sets it in [verifier.env]), TESTS_DIR names the tests' folder, hooks of Git repositories are off,
and only finite numbers within the task's range are accepted.

Limits: a verifier that imports or runs what is in the working directory runs the agent's code, which can do anything
that the verifier can; tests that only read files should start Python with -I, as the example tasks do. On a backend
without a boundary (plain local) the agent runs as you and could prepare anything that you could.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from harness_trainer.rewards import guard, turns, workspace
from harness_trainer.rewards.base import (
    Code,
    Finding,
    RewardUnreadable,
    VerifierResult,
    VerifyMode,
    parse_json,
    parse_text,
    trained_reward,
)
from harness_trainer.rewards.guard import LOGS, PRIVATE, TESTS
from harness_trainer.rewards.workspace import DEFAULT_CAPS, Caps
from harness_trainer.tasks import Task, resolve_box, resolve_env
from harness_trainer.tasks.grading import GradingRules, grading_rules
from sandboxes.base import (
    Backend,
    BoxSpec,
    Command,
    Network,
    NetworkMode,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxGone,
    TooLarge,
    Traits,
)

__all__ = ["Caps", "VerifierResult", "VerifyMode", "verify"]

FINAL_MESSAGE = "/logs/agent/final_message.txt"
_OUTPUT_CAP = 100_000  # bytes of the tests' output that are kept
_READ_CAP = 10_000  # bytes of a reward file; a longer one is no number
_FRESH_SLACK_S = 180.0  # what a fresh sandbox may live beyond the tests' time limit: copying in, reading out
# The agent may have removed or replaced its folder; the tests run all the same, in an empty one, and score that.
_RUN = """
cd "$1" 2>/dev/null || cd "$TMPDIR" || exit 1
for bash in /bin/bash /usr/bin/bash /usr/local/bin/bash; do [ -x "$bash" ] && exec "$bash" "$2"; done
exec bash "$2"
"""
# Git runs programs that a repository names, with the rights of whoever asks it for its status.
_GIT = {
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}


async def verify(
    task: Task,
    sandbox: Sandbox,
    *,
    backend: Backend,
    final_message: str | None,
    mode: VerifyMode = VerifyMode.AUTO,
    spec: BoxSpec | None = None,
    timeout_s: float | None = None,
    keep: Path | None = None,
    registry: Path | None = None,
    caps: Caps = DEFAULT_CAPS,
    before_tests: Callable[[], Awaitable[None]] | None = None,
) -> VerifierResult:
    """Score what the agent left in `sandbox`. Ends every process there first, and what the tests leave afterwards.

    `final_message` is what the agent said last (None = nothing); tests read it at /logs/agent/final_message.txt.
    `backend` made `sandbox` from `spec` (None = the task's) and makes the fresh one. `timeout_s` None = the task's own
    limit for its tests. `keep` = folder for the verifier's logs and the task's artifacts (None = not kept). `registry`
    = where the temp folder of a copy is recorded (None = the default one). `before_tests` is called before tests are
    brought into `sandbox` itself: until then, and where they run in a fresh one, all of this can be done over again;
    from then on the agent's code may have run with the tests' rights there. Raises SandboxError when a sandbox fails
    (never scored as 0), TaskError when [metadata] is wrong or the verifier needs a variable that is not set.
    """
    rules = grading_rules(task)
    limit_s = task.verifier_timeout_s if timeout_s is None else timeout_s
    spec = spec or resolve_box(task)
    work = _Scoring(task, spec, rules, backend.traits, resolve_env(task), final_message, limit_s, keep, caps.kept)
    if not work.runs_fresh(sandbox, mode):
        with work.timed("stop"):
            await sandbox.kill_all()
        await work.keep_artifacts(sandbox)
        if before_tests is not None:
            await before_tests()
        return await work.score(sandbox, VerifyMode.SAME, look_in=workspace.sources(task, sandbox.workdir))
    with work.timed("stop"):
        await work.stop_agent(sandbox)
    await work.keep_artifacts(sandbox)
    async with workspace.scratch_folder(registry) as folder:
        paths = workspace.sources(task, sandbox.workdir)
        try:
            with work.timed("copy"):
                snapshot = await workspace.take(sandbox, paths, folder, caps.workspace)
        except TooLarge:
            left = f"the agent left more than {caps.workspace // 1_000_000} MB in {', '.join(paths)}"
            return work.unscored(Code.WORKSPACE_TOO_LARGE, left)
        work.findings += snapshot.findings
        fresh = _fresh_spec(task, spec, backend.traits, limit_s)
        async with AsyncExitStack() as stack:
            with work.timed("box"):
                box = await stack.enter_async_context(backend.sandbox(fresh))
            with work.timed("copy"):
                work.findings += await workspace.give(snapshot, box)
            return await work.score(box, VerifyMode.FRESH, look_in=paths)


class _Scoring:
    """One scoring under way: what is known so far, and the steps that both modes share."""

    def __init__(
        self,
        task: Task,
        spec: BoxSpec,
        rules: GradingRules,
        traits: Traits,
        env: dict[str, str],
        final_message: str | None,
        limit_s: float,
        keep: Path | None,
        kept_cap: int,
    ) -> None:
        self._task, self._spec, self._rules = task, spec, rules
        self._traits, self._env = traits, env
        self._final_message, self._limit_s = final_message, limit_s
        self._keep, self._kept_cap = keep, kept_cap
        self.findings: list[Finding] = []
        self._stages_s: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._stages_s[stage] = self._stages_s.get(stage, 0.0) + time.monotonic() - started

    def runs_fresh(self, sandbox: Sandbox, mode: VerifyMode) -> bool:
        """Whether the tests need a sandbox of their own. What the task demands wins, then the run, then the facts."""
        if mode is VerifyMode.AUTO and self._rules.verify is not None:
            mode = VerifyMode(self._rules.verify)
        apart = self._traits.users and not self._traits.escalation and _apart(sandbox.user, self._tests_user())
        connected = _has(self._spec.network, self._task.verifier_network)
        fresh = (
            self._task.verifier_fresh
            or mode is VerifyMode.FRESH
            or (mode is VerifyMode.AUTO and self._traits.boundary and not (apart and connected))
        )
        if fresh and sandbox.workdir == "/":
            raise SandboxError(
                f"task {self._task.name!r} works in /, which cannot be copied into a fresh sandbox;"
                ' set [environment] workdir, or [metadata] verify = "same"'
            )
        if not fresh and self._traits.boundary and not apart:
            who = f"the agent's user ({sandbox.user})"
            self.findings.append(Finding(Code.NOT_SEPARATED, f"nothing kept {who} from preparing the tests' run"))
        if not fresh and self._traits.boundary and not connected:
            detail = "tests run in the agent's sandbox, whose network is not the one that [verifier] asks for"
            self.findings.append(Finding(Code.NOT_CONNECTED, detail))
        return fresh

    def _tests_user(self) -> str | None:
        """Who runs the tests; None = the sandbox's own user, where there is no other."""
        return (self._task.verifier_user or "root") if self._traits.users else None

    async def stop_agent(self, sandbox: Sandbox) -> None:
        """Before copying. An agent that was root may have broken its sandbox so that it cannot be told to stop."""
        try:
            await sandbox.kill_all()
        except SandboxGone:
            raise
        except SandboxError as e:
            self.findings.append(Finding(Code.AGENT_NOT_STOPPED, str(e)))

    async def keep_artifacts(self, sandbox: Sandbox) -> None:
        if self._keep is not None:
            with self.timed("keep"):
                self.findings += await workspace.keep_artifacts(
                    self._task, sandbox, self._keep / "artifacts", self._kept_cap
                )

    async def score(self, box: Sandbox, mode: VerifyMode, *, look_in: list[str]) -> VerifierResult:
        """Bring the tests into `box`, where nothing of the agent runs, run them and read what they say."""
        with self.timed("prepare"):
            env = await self._prepare(box, mode, look_in)
        with self.timed("tests"):
            ran = await box.run(
                Command(
                    ["/bin/sh", "-c", _RUN, "sh", box.resolve(box.workdir), box.resolve(f"{TESTS}/test.sh")],
                    cwd="/",
                    env=env,
                    timeout_s=self._limit_s,
                    output_cap=_OUTPUT_CAP,
                    user=self._tests_user(),
                )
            )
        with self.timed("stop"):
            await box.kill_all()  # what the tests left running must not write while we read
        rewards, detail = await self._read(box, ran)
        reward = trained_reward(rewards, self._rules, "the reward") if rewards else None
        turn_rewards = await self._turn_rewards(box) if rewards else ()
        if self._keep is not None:
            with self.timed("keep"):
                self.findings += await workspace.keep_logs(box, LOGS, self._keep / "verifier", self._kept_cap)
        return VerifierResult(
            reward,
            detail,
            ran.stdout + ran.stderr,
            ran.duration_s,
            ran.timed_out,
            rewards=rewards,
            turn_rewards=turn_rewards,
            exit_code=ran.exit_code,
            oom=ran.oom,
            mode=mode,
            findings=tuple(self.findings),
            stages_s=self._stages_s,
        )

    async def _prepare(self, box: Sandbox, mode: VerifyMode, look_in: list[str]) -> dict[str, str]:
        """The tests' folders and files; the variables to run them with."""
        task, user = self._task, self._tests_user()
        await box.put_text(self._final_message or "", FINAL_MESSAGE)
        for folder in (LOGS, TESTS, PRIVATE):
            await box.reset_dir(folder, private=True)
        if task.tests_dir is not None:
            await box.put_dir(task.tests_dir, TESTS)
        else:
            await box.put_text(task.verify_script or "", f"{TESTS}/test.sh", 0o755)
        places = [*look_in, "/logs/agent", "/home", "/tmp"]
        self.findings += await guard.settle(box, owner=user, look_in=places)
        ask_agent = mode is VerifyMode.SAME and _apart(box.user, user)
        reached = places if mode is VerifyMode.SAME else look_in
        variables, found = await guard.clean_variables(box, ask_agent=ask_agent, distrusted=reached)
        self.findings += found
        ours = {"HOME": box.resolve(f"{PRIVATE}/home"), "TMPDIR": box.resolve(f"{PRIVATE}/tmp")}
        ours |= {"TESTS_DIR": box.resolve(TESTS), "PYTHONNOUSERSITE": "1"}
        return {**variables, **_GIT, **ours, **self._env}

    async def _read(self, box: Sandbox, ran: RunResult) -> tuple[dict[str, float], str]:
        """The rewards by name, or none and the reason for people; the reason is also a finding."""
        name = self._task.name
        if ran.timed_out:
            return self._refuse(
                Code.VERIFIER_TIMEOUT, f"the tests of {name!r} did not end within {ran.duration_s:.0f} s"
            )
        if ran.oom:
            return self._refuse(Code.VERIFIER_OOM, f"the tests of {name!r} ran into the sandbox's memory limit")
        try:
            return await self._parse(box), ""
        except RewardUnreadable as e:
            return self._refuse(e.code, f"the tests of {name!r} gave no reward (exit code {ran.exit_code}): {e}")

    def _refuse(self, code: Code, detail: str) -> tuple[dict[str, float], str]:
        self.findings.append(Finding(code, detail))
        return {}, detail

    async def _parse(self, box: Sandbox) -> dict[str, float]:
        for file, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
            text = await box.get_text(f"{LOGS}/{file}", cap=_READ_CAP + 1)
            if text is None:
                continue
            if len(text) > _READ_CAP:
                raise RewardUnreadable(Code.REWARD_UNREADABLE, f"{file} is longer than {_READ_CAP} bytes")
            return parse(text, self._rules)
        raise RewardUnreadable(Code.REWARD_MISSING, "they wrote neither reward.txt nor reward.json (as a regular file)")

    async def _turn_rewards(self, box: Sandbox) -> tuple[float | None, ...]:
        text = await box.get_text(f"{LOGS}/{turns.FILE}", cap=_READ_CAP + 1)
        if text is None:
            return ()
        try:
            if len(text) > _READ_CAP:
                raise ValueError(f"{turns.FILE} is longer than {_READ_CAP} bytes")
            return tuple(turns.parse_turn_rewards(text))
        except ValueError as e:
            self.findings.append(Finding(Code.TURN_REWARDS_UNUSABLE, str(e)))
            return ()

    def unscored(self, code: Code, detail: str) -> VerifierResult:
        """The tests could not even start."""
        self._refuse(code, detail)
        findings, stages_s = tuple(self.findings), self._stages_s
        return VerifierResult(None, detail, "", 0.0, False, mode=VerifyMode.FRESH, findings=findings, stages_s=stages_s)


def _apart(agent: str | None, tests: str | None) -> bool:
    """Whether the agent's user is surely kept from what the tests' user owns."""
    if agent is None or tests is None or _is_root(agent):
        return False
    # A name and a number may be the same account; two names or two numbers are taken at their word.
    return _is_root(tests) or (agent != tests and agent.isdigit() == tests.isdigit())


def _has(network: Network, wanted: Network | None) -> bool:
    """Whether tests in a sandbox with `network` reach what they ask for; None = nothing in particular."""
    if wanted is None or wanted.mode in (NetworkMode.NONE, NetworkMode.PROXY_ONLY):
        return True
    return network.mode is NetworkMode.PUBLIC or network == wanted


def _is_root(user: str) -> bool:
    return user in ("root", "0")


def _fresh_spec(task: Task, spec: BoxSpec, traits: Traits, limit_s: float) -> BoxSpec:
    """The agent's sandbox once more, without its mounts, and without a way out unless the tests ask for one."""
    network = task.verifier_network
    if network is None:
        network = Network(NetworkMode.NONE) if NetworkMode.NONE in traits.networks else spec.network
    limits = replace(spec.limits, deadline_s=limit_s + _FRESH_SLACK_S)
    return replace(spec, network=network, limits=limits, mounts=())
