"""Our rollouts as OpenEnv sessions, for trainers that drive `ResourceSessionFactory`: an agent, its capture, its score.

Owns the translation: which task a prompt means, what an outcome is in OpenEnv's terms, in what order turns are handed
over. Rollouts themselves are `rollouts.rollout`'s. With TRL's harness worker:

    worker = HarnessRolloutWorker(
        harness_session_factory=partial(
            HarnessSessionFactory, tasks="examples", harness="opencode", model="smollm2", context=8192,
            agent_url="http://127.0.0.1:8001", admin_url="http://127.0.0.1:8002",
        ), ...)
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import uuid
from collections.abc import Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
from openenv.core.harness.training import TrainingTrace
from pydantic import TypeAdapter

from capture_proxy.graph import build
from capture_proxy.trace import to_training_trace, trained_turns
from capture_proxy.types import Capture
from harness_trainer.cache import cache_dir
from harness_trainer.config import as_sandbox
from harness_trainer.errors import SetupError, TaskError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.interop.workshop import Work, Workshop
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.curriculum import task_of_group
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task, load_tasks
from sandboxes import SandboxConfig
from sandboxes.base import Access, Endpoint
from sandboxes.lifecycle import default_registry

log = logging.getLogger("harness_trainer.interop")

UNKNOWN_EXIT = -1  # what `wait_for_completion` returns where no exit code is known: never 0


class SessionFailed(RuntimeError):
    """The machinery failed, not the agent: there is nothing to score and nothing to train on."""


def prompt_rows(tasks: str) -> list[dict[str, Any]]:
    """A row per task for a trainer's dataset, in the form that `HarnessSessionFactory.create` knows again.

    The message's `name` is the task's, for tasks may have the same instruction.
    """
    return [{"prompt": [{"role": "user", "name": t.name, "content": t.instruction}]} for t in load_tasks(tasks)]


class HarnessSession(ResourceSession):  # type: ignore[misc]
    """One rollout. Satisfies OpenEnv's `TrainableSession`; its agent is at work from the start."""

    def __init__(self, job: Job, workshop: Workshop) -> None:
        self.job = job
        self._workshop = workshop
        self._work: Work[RolloutResult] = workshop.submit(run_rollout(job, workshop.means))

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.job.task.instruction}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error="the agent in the sandbox owns the loop: nothing here calls tools")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code, once its work is scored.

        Raises TimeoutError when its time, or `timeout_s`, is up (what it did so far can be trained) and SessionFailed
        when the machinery failed.
        """
        try:
            result = self._work.result(timeout_s)
        except concurrent.futures.CancelledError as error:
            raise SessionFailed(f"rollout {self.job.rollout_id} was closed before it ended") from error
        if result.outcome is Outcome.INFRA_FAILED:
            raise SessionFailed(
                f"rollout {result.rollout_id} failed in its stage {result.failed_stage}: {result.detail}"
            )
        if result.timed_out:
            raise TimeoutError(f"rollout {result.rollout_id}: {result.detail}")
        return UNKNOWN_EXIT if result.exit_code is None else result.exit_code

    def fetch_training_trace(self) -> TrainingTrace:
        """Every captured call, validated. An agent that is still at work is ended: what it did so far counts."""
        self.close()
        return self._workshop.submit(self._trace()).result()

    async def _trace(self) -> TrainingTrace:
        admin = self._workshop.means.admin
        await admin.seal(self.job.rollout_id)
        return lineage_by_lineage(await admin.capture(self.job.rollout_id))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """The reward that the task's own tests gave in the sandbox; None = it could not be scored."""
        result = self._result()
        if result is None:
            return VerifyResult(env_reward=None, done=False, metrics={"outcome": "unfinished"})
        return VerifyResult(
            env_reward=result.reward,
            done=True,
            metrics={
                "outcome": result.outcome.value,
                "harness": result.harness,
                "task": result.task,
                "turns": result.num_turns,
                **{f"stage_s/{name}": seconds for name, seconds in result.stages_s.items()},
                **{f"reward/{name}": value for name, value in result.rewards.items()},
            },
            artifacts={"findings": list(result.findings), "detail": result.detail, "rollout_id": result.rollout_id},
        )

    def close(self) -> None:
        """End the rollout if it has not ended, its sandbox with it. Idempotent; returns when nothing is left."""
        self._work.cancel()
        self._work.wait()

    def _result(self) -> RolloutResult | None:
        try:
            return self._work.result(0)
        except (TimeoutError, concurrent.futures.CancelledError):
            return None


class HarnessSessionFactory(ResourceSessionFactory[HarnessSession]):  # type: ignore[misc]
    """Makes sessions of one agent on some tasks, through a capture gateway that is running already.

    Everything it is given can be pickled, so that a trainer can make it in a process of its own. The gateway's admin
    key comes in CAPTURE_PROXY_ADMIN_KEY; `agent_socket` is the gateway's, which sealed containers need. `sampling` is
    what the trainer's policy demands of every call; it wins over `rollouts`. Sandboxes live until `close`, or until
    this process ends.
    """

    def __init__(
        self,
        *,
        tasks: str,
        model: str,
        context: int,
        agent_url: str,
        admin_url: str,
        agent_socket: Path | str | None = None,
        harness: str = "opencode",
        sandbox: str | Mapping[str, Any] = "local",
        rollouts: Mapping[str, Any] | None = None,
        sampling: Mapping[str, float] | None = None,
        artifacts: Path | str = "artifacts",
    ) -> None:
        adapter = load_harness(harness)
        admin_key = os.environ.get("CAPTURE_PROXY_ADMIN_KEY")
        if not admin_key:
            raise SetupError("set CAPTURE_PROXY_ADMIN_KEY to the admin key of the gateway at " + admin_url)
        self._tasks = load_tasks(tasks)
        self._config = _config(rollouts or {}, sampling or {})
        spec = RunnerSpec(
            config=self._config,
            sandbox=TypeAdapter(SandboxConfig).validate_python(as_sandbox(sandbox)),
            tasks=tasks,
            harness=harness,
            harness_bin=ensure_installed(adapter, cache_dir(), log.info),
            store=Path(os.devnull),  # results are the trainer's, not a run's
            artifacts=Path(artifacts).resolve(),
            registry=default_registry(),
            run_id=f"sessions-{uuid.uuid4().hex[:8]}",
            model=model,
            context=context,
            access=Access(gateway=Endpoint(agent_url, Path(agent_socket) if agent_socket else None)),
            admin_url=admin_url,
            max_open_groups=1,
            num_groups=1,
        )
        self._workshop = Workshop(spec, self._tasks, admin_key)
        # Unlike atexit this also holds in the children of multiprocessing, which is where TRL makes factories.
        self._at_exit = Finalize(None, self._workshop.close, exitpriority=10)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> HarnessSession:
        """Start the agent on a task: one by name, a prompt of `prompt_rows`, or, with an empty prompt, `seed`'s task.

        An instruction alone that several tasks have means one of them, by seed. The same seed always means the same
        task. Raises TaskError for a prompt that belongs to no task.
        """
        group = seed if seed is not None else 0
        # An id of our own: a trainer may give one twice, and a session of the gateway is single-use.
        rollout_id = f"s{group:05d}-{(episode_id or 'episode')[:8]}-{uuid.uuid4().hex[:8]}"
        return HarnessSession(Job(rollout_id, group, 0, self._task(task, seed)), self._workshop)

    def close(self) -> None:
        """End all sessions and sandboxes. Idempotent."""
        self._at_exit.cancel()
        self._workshop.close()

    def _task(self, wanted: Any, seed: int | None) -> Task:
        if isinstance(wanted, Task):
            return wanted
        name, text = _asked_for(wanted)
        found = (
            [task for task in self._tasks if task.name == name]
            or [task for task in self._tasks if task.name == text]
            or [task for task in self._tasks if text and task.instruction.strip() == text]
        )
        if len(found) > 1 and seed is None:
            names = ", ".join(task.name for task in found[:5])
            raise TaskError(f"several tasks have the instruction {text[:80]!r}: give a name ({names}, ...) or a seed")
        if found:
            return found[(seed or 0) % len(found)]
        if text or seed is None:
            names = ", ".join(task.name for task in self._tasks[:5])
            raise TaskError(
                f"no task is meant by the prompt {text[:80]!r}: give a task's name or instruction ({names}, ...),"
                " or an empty prompt and a seed"
            )
        return task_of_group(seed, self._tasks, self._config.seed)


def _asked_for(wanted: Any) -> tuple[Any, str]:
    """The prompt's name, if it has one, and its text: a string, or the last user message of a conversation."""
    name = None
    if isinstance(wanted, list):
        users = [message for message in wanted if isinstance(message, Mapping) and message.get("role") == "user"]
        last: Mapping[str, Any] = users[-1] if users else {}
        name, wanted = last.get("name"), last.get("content")
    return name, wanted.strip() if isinstance(wanted, str) else ""


def _config(rollouts: Mapping[str, Any], sampling: Mapping[str, float]) -> RolloutConfig:
    config = RolloutConfig.model_validate(dict(rollouts))
    further = {name: value for name, value in sampling.items() if name != "temperature"}
    temperature = float(sampling.get("temperature", config.temperature))
    return config.model_copy(update={"temperature": temperature, "sampling": {**config.sampling, **further}})


def lineage_by_lineage(capture: Capture) -> TrainingTrace:
    """The capture call by call, each lineage's calls together: calls of a sub-agent between two of the main agent's
    would make a trainer that chains neighbours begin a new row at each change. Untrained calls come first."""
    trace = to_training_trace(capture)
    trained = trained_turns(capture)
    lineages = build(list(trained.values())).lineages
    order: dict[str, int] = {}
    for path in sorted(lineages, key=lambda path: trained[path[-1]].index):
        for turn_id in path:
            order.setdefault(turn_id, len(order))
    return TrainingTrace(turns=sorted(trace.turns, key=lambda turn: order.get(turn.node_id, -1)))
