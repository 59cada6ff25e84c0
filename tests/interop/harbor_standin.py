"""OpenEnv's own `openenv harbor serve`, all of it, on a Harbor that is not there: `harbor_standin.py PORT DATASET...`

Real are the server, its Task API and WebSocket, its capture proxy, its probe of an engine and its `run_rollout`. Harbor
itself needs another Python; here its `Trial` is a few lines: an agent in this process that does what the name of the
task says (`AGENTS`), and a verifier that scores as the name says. Started by `openenv_servers.py`.
"""

import asyncio
import enum
import os
import sys
import types
from types import SimpleNamespace

import httpx

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


class Failure(Exception):
    """What Harbor records of a trial that failed. Example: Failure("AgentTimeoutError", "too slow")."""


class Agent:
    def __init__(self, config):
        env = config.agent.env
        self.url, self.key, self.model = env["OPENAI_BASE_URL"], env["MSWEA_API_KEY"], config.agent.model_name
        self.timeout_s = config.agent.override_timeout_sec
        self.messages = []

    async def ask(self, text=None, tools=True):
        """One model call; the reply's message."""
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, **({"tools": [TOOL]} if tools else {})}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            got = await http.post(
                f"{self.url}/chat/completions", json=body, headers={"authorization": f"Bearer {self.key}"}
            )
        if got.status_code != 200:
            raise Failure("NonZeroAgentExitCodeError", f"the agent gave up: {got.status_code} {got.text[:200]}")
        message = got.json()["choices"][0]["message"]
        self.messages.append({k: v for k, v in message.items() if v is not None})
        for call in message.get("tool_calls") or []:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        return message


async def works(agent):
    while (await agent.ask(None if agent.messages else "Say moon.")).get("tool_calls"):
        pass


async def toolless(agent):
    await agent.ask("Say moon.", tools=False)
    await agent.ask("Again.", tools=False)


async def loops(agent):
    for _ in range(50):
        if not (await agent.ask("More.")).get("tool_calls"):
            return


async def fails(agent):
    await agent.ask("Say moon.")
    raise Failure("NonZeroAgentExitCodeError", "exit code 3: no such model")


async def slow(agent):
    await agent.ask("Say moon.")
    await asyncio.sleep(agent.timeout_s)
    raise Failure("AgentTimeoutError", f"Agent execution timed out after {agent.timeout_s} seconds")


async def hangs(agent):
    await agent.ask("Say moon.")
    await asyncio.sleep(3600)


async def dies(agent):
    await agent.ask("Say moon.")
    os._exit(9)


async def unbuilt(agent):
    raise Failure("SandboxBuildFailedError", "line 3: no such package")


async def explodes(agent):
    await agent.ask("Say moon.")
    raise RuntimeError("the sandbox is on fire")


async def ungraded(agent):
    await works(agent)
    raise Failure("RewardFileNotFoundError", "no /logs/verifier/reward.txt")


async def silent(agent):
    pass


meeting = []


async def meets(agent):
    """Two at once: none goes on before the other has begun."""
    await agent.ask("Who am I?")
    meeting.append(agent.key)
    while len(meeting) < 2:
        await asyncio.sleep(0.01)
    await agent.ask("And now?")


AGENTS = {
    f.__name__: f for f in (works, toolless, loops, fails, slow, hangs, dies, unbuilt, explodes, ungraded, silent)
}
AGENTS |= {"meets": meets, "unscored": works, "notanumber": works, "several": works}
REWARDS = {"unscored": {}, "notanumber": {"reward": float("nan"), "speed": 1.0}, "several": {"a": 1.0, "b": 0.0}}


class Trial:
    def __init__(self, config):
        self.config = config

    @classmethod
    async def create(cls, config):
        return cls(config)

    async def run(self):
        kind, info = self.config.task.path.name.split("-")[0], None
        agent = Agent(self.config)
        try:
            await AGENTS[kind](agent)
        except Failure as failure:
            info = SimpleNamespace(exception_type=failure.args[0], exception_message=failure.args[1])
        said = str(agent.messages[-1].get("content")) if agent.messages else ""
        rewards = REWARDS.get(kind, {"reward": 1.0 if "moon" in said else 0.25})
        if info is not None and info.exception_type not in ("AgentTimeoutError", "NonZeroAgentExitCodeError"):
            rewards = {}  # Harbor verifies after these two only
        return SimpleNamespace(verifier_result=SimpleNamespace(rewards=rewards), exception_info=info)


class EnvironmentType(enum.StrEnum):
    DOCKER = "docker"
    E2B = "e2b"


class EnvironmentFactory:
    @staticmethod
    def run_preflight(kind):
        if kind is EnvironmentType.E2B:
            raise SystemExit("E2B_API_KEY is not set")


def install_harbor():
    """The few names that OpenEnv takes from Harbor."""
    configs = {f"{name}Config": SimpleNamespace for name in ("Agent", "Environment", "Task", "Trial", "Verifier")}
    names = {
        "harbor.models.trial.config": configs,
        "harbor.trial.trial": {"Trial": Trial},
        "harbor.models.environment_type": {"EnvironmentType": EnvironmentType},
        "harbor.environments.factory": {
            "EnvironmentFactory": EnvironmentFactory,
            "_load_environment_class": lambda kind: EnvironmentFactory,
        },
    }
    for path, members in names.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            module = sys.modules.setdefault(name, types.ModuleType(name))
            module.__path__ = []
        for member, value in members.items():
            setattr(module, member, value)


def main():
    port, datasets = int(sys.argv[1]), sys.argv[2:]
    install_harbor()
    import uvicorn
    from openenv.harbor.serving import HarborService, build_app

    service = HarborService(datasets=datasets, capture_port=port + 1, expose="direct", capture_level="text")
    service.start()
    HarborService.set_current(service)
    uvicorn.run(build_app(datasets=datasets), host="127.0.0.1", port=port, log_level="info")


if __name__ == "__main__":
    main()
