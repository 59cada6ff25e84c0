"""Runs one rollout with everything real but the engine: for tests of rollouts and of agents."""

import contextlib
import sys
from pathlib import Path

from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.entry import entered
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.types import Job
from harness_trainer.tasks import Task
from sandboxes import open_backend
from sandboxes.base import Access, Endpoint
from sandboxes.local import LocalConfig
from sandboxes.pool import Bounds, Pool
from tests.capture.serving import KEY, Served, served

# Scores 1 when the agent's last words contain "moon", 0.5 when a file answer.txt exists, else 0.
VERIFY = """
R=0
[ -f answer.txt ] && R=0.5
grep -q moon "${SANDBOX_ROOT:-}/logs/agent/final_message.txt" && R=1
echo $R > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"
"""


def task(tmp_path, verify=VERIFY, agent_timeout_s=60.0):
    return Task("moon", tmp_path, "Say moon.", verify_script=verify, agent_timeout_s=agent_timeout_s)


def shell_agent(script: str) -> Harness:
    return Harness.model_validate(
        {
            "name": "shell",
            "dialect": "openai_chat",
            "argv": ["sh", "-c", script],
            "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
            "output": {"type": "text"},
        }
    )


CALL = (
    'curl -s -m 20 -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" '
    """-d '{"model": "m", "messages": [{"role": "user", "content": "go"}]}' "$URL" """
)


def runner_spec(folder: Path, gateway: Served, **fields) -> RunnerSpec:
    """What a runner is told that works in `folder` on this gateway; a test's own `fields` go before."""
    given = {
        "harness_bin": Path("/usr/bin"),
        "store": folder / "store.sqlite",
        "artifacts": folder / "artifacts",
        "registry": folder / "owned",
        "run_id": "test",
        "model": "scripted",
        "context": 8192,
        "access": Access(gateway=Endpoint(url=gateway.agent_url)),
        "admin_url": gateway.admin_url,
        "max_open_groups": 1,
        "num_groups": 1,
    }
    return RunnerSpec(**{**given, **fields})


@contextlib.asynccontextmanager
async def rolling(
    tmp_path: Path, engine, harness, *, sandbox=None, harness_bin=None, run_id="test", tasks=(), **settings
):
    """Everything a runner has while it runs; gives its `Means`. Proxies are started for the allow-lists of `tasks`."""
    rollouts = RolloutConfig(**{"timeout_s": 60, "max_turns": 4, "max_tokens": 2048, **settings})
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(served(engine, tmp_path / "store.sqlite"))
        spec = runner_spec(
            tmp_path,
            gateway,
            config=rollouts,
            sandbox=sandbox or LocalConfig(root=tmp_path / "boxes"),
            tasks="-",
            harness="-",
            harness_bin=harness_bin or Path(sys.executable).parent,
            run_id=run_id,
        )
        harness = entered(harness, rollouts.entry)
        access = await open_access(stack, spec, tasks, KEY, harness)
        backend = open_backend(spec.sandbox, run_id=run_id, registry=spec.registry, access=access)
        await stack.enter_async_context(backend)
        bounds = Bounds(rollouts.warm_per_task, rollouts.warm_total, rollouts.max_concurrent)
        pool = await stack.enter_async_context(Pool(backend, bounds))
        harbor = await open_harbor(stack, spec, backend, harness)
        boxes = Boxes(spec, harness, access)
        yield Means(
            boxes=boxes,
            backend=backend,
            pool=pool,
            caps=Caps(rollouts),
            admin=gateway.admin,
            reward=load_reward(rollouts.reward),
            harbor=harbor,
        )


async def roll(tmp_path: Path, engine, harness, *, job_task=None, **settings):
    job_task = job_task or task(tmp_path)
    async with rolling(tmp_path, engine, harness, tasks=[job_task], **settings) as means:
        result = await run_rollout(Job("g0-0-a", 0, 0, job_task), means)
    assert list((tmp_path / "boxes").glob("*")) == [], "the sandbox must be gone"
    assert list((tmp_path / "owned").glob("*.json")) == [], "and nothing on record"
    return result
