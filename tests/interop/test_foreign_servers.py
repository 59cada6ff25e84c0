"""What calls itself a Harbor server and is none, or breaks off: each is an error that says so, and soon."""

import asyncio
import contextlib
import json
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.environments import OpenEnvHarborConfig
from harness_trainer.environments.openenv_harbor import HarborServer, inspect_server, require_reachable
from harness_trainer.errors import ConfigError, HarnessTrainerError, SetupError
from harness_trainer.rollouts.harbor_server import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from tests.interop.test_harbor_server import meaning

SPLITS = [{"name": "moons", "num_tasks": 1}]
TASKS = [{"index": 0, "task_id": "/d/moon", "task_name": "moon", "dataset": "moons", "instruction": "Say moon."}]
CAN = {"harnesses": [{"name": "pi", "status": "validated"}], "sandboxes": [{"name": "docker", "available": True}]}


class Odd:
    """A server whose Task API is right, and whose tools answer what the test says."""

    def __init__(self, answer=None, *, status=200, splits=SPLITS, tasks=TASKS, number=1):
        self.answer, self.authorization = answer, []

        async def listed(request):
            self.authorization.append(request.headers.get("authorization"))
            return JSONResponse(splits, status)

        async def counted(request):
            return JSONResponse({"num_tasks": number}, status)

        async def ranged(request):
            asked = await request.json()
            return JSONResponse({"tasks": tasks[asked["start"] : asked["stop"]]}, status)

        self.app = Starlette(
            routes=[
                Route("/harbor_env/splits", listed),
                Route("/harbor_env/num_tasks", counted, methods=["POST"]),
                Route("/harbor_env/task_range", ranged, methods=["POST"]),
                WebSocketRoute("/ws", self.speak),
            ]
        )

    async def speak(self, socket):
        await socket.accept()
        with contextlib.suppress(Exception):
            while (asked := await socket.receive_json())["type"] != "close":
                if asked["type"] == "state":
                    await socket.send_json({"type": "state", "data": {}})
                    continue
                answer = CAN if asked["data"]["tool_name"] == "capabilities" else self.answer
                if answer == "cut":
                    return
                if answer == "hang":
                    await asyncio.sleep(3600)
                if isinstance(answer, bytes):
                    await socket.send_text(answer.decode())
                    continue
                text = answer if isinstance(answer, str) else json.dumps(answer)
                await socket.send_json({"type": "observation", "data": {"observation": {"result": {"data": text}}}})


@contextlib.asynccontextmanager
async def serving(app):
    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self):
            yield

    server = Quiet(uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield OpenEnvHarborConfig(url=f"http://127.0.0.1:{port}", harness="pi", sandbox="docker")
    finally:
        server.should_exit = True
        await task


async def refused(app, error, says, **changes):
    async with serving(app) as config:
        with pytest.raises(error, match=says):
            await inspect_server(config.model_copy(update=changes))


async def test_nobody_there():
    with pytest.raises(SetupError, match="no server answers at http://127.0.0.1:9 .*openenv harbor serve"):
        await inspect_server(OpenEnvHarborConfig(url="http://127.0.0.1:9"))
    with pytest.raises(SetupError, match="no server answers at http://no-such-host.invalid"):
        await inspect_server(OpenEnvHarborConfig(url="http://no-such-host.invalid"))


@pytest.mark.parametrize("body", [JSONResponse({"detail": "Not Found"}, 404), PlainTextResponse("<html>")])
async def test_a_server_of_another_kind(body):
    async def app(scope, receive, send):
        await body(scope, receive, send)

    await refused(app, SetupError, "is no `openenv harbor serve` server: /harbor_env/splits answered")


@pytest.mark.parametrize(
    ("odd", "error", "says"),
    [
        (Odd(status=500), SetupError, "answered /harbor_env/splits with 500"),
        (Odd(status=403), SetupError, "refuses us .403.*--env.token-env"),
        (Odd(splits=[]), ConfigError, "set --env.split to one of none"),
        (Odd(splits={"a": 1}), SetupError, "makes no sense"),
        (Odd(splits=[{"nom": "x"}]), SetupError, "makes no sense"),
        (Odd(number=None), SetupError, "does not say how many tasks"),
        (Odd(tasks=[{"title": "x"}]), SetupError, "makes no sense"),
        (Odd(number=0), HarnessTrainerError, "has no task"),
    ],
)
async def test_a_task_list_that_is_none(odd, error, says):
    await refused(odd.app, error, says)


async def test_tasks_come_in_pages_and_names_that_two_have_are_told_apart():
    many = [{**TASKS[0], "index": n, "task_name": f"t{n // 2 if n < 2 else n}"} for n in range(450)]
    async with serving(Odd(tasks=many, number=450).app) as config:
        tasks = await HarborServer(config).tasks()
    assert [task.name for task in tasks[:3]] == ["t0#0", "t0#1", "t2"] and len({task.name for task in tasks}) == 450


async def test_a_token_is_sent_and_is_no_setting(monkeypatch):
    monkeypatch.setenv("MY_SPACE", "hf_secret")
    odd = Odd()
    async with serving(odd.app) as config:
        config = config.model_copy(update={"token_env": "MY_SPACE"})
        assert (await inspect_server(config)).notes == []
    assert odd.authorization == ["Bearer hf_secret"] and "hf_secret" not in config.model_dump_json()


async def rolled(tmp_path, odd, **rollouts):
    async with serving(odd.app) as config, meaning(tmp_path, ScriptedEngine("x"), config, **rollouts) as means:
        (task,) = await means.server.tasks()
        began = time.monotonic()
        result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
        took_s = time.monotonic() - began
        assert (await means.admin.session("g0-0-a")).sealed, "its agent gets nothing more from the model"
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "agent")
    assert took_s < 10, result.stages_s
    return result.detail


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("cut", "the server at http://127.0.0.1"),
        ("hang", "agent took more than 2 s"),
        (b"not json", "Expecting value"),
        (b'{"type": "error", "data": {"message": "out of disk", "code": "EXECUTION_ERROR"}}', "out of disk"),
        (b'{"type": "observation", "data": {"observation": []}}', "it answered run_rollout with '[]'"),
        (b'{"type": "observation", "data": {"observation": {"result": {"content": []}}}}', "which holds no text"),
        (
            b'{"type": "observation", "data": {"observation": {"error": {"message": "late", "error_type": "t"}}}}',
            "its tool run_rollout failed: late (t)",
        ),
        ("<html>", "its result is none"),
        ({"rewards": {"reward": "high"}}, "its result is none"),
        ({"ok": False, "error": "no capture proxy is running"}, "no capture proxy is running"),
    ],
)
async def test_an_answer_that_is_no_rollout(tmp_path, answer, says):
    if isinstance(answer, dict) and "ok" in answer:  # the server says itself that it never began
        async with serving(Odd(answer).app) as config, meaning(tmp_path, ScriptedEngine("x"), config) as means:
            (task,) = await means.server.tasks()
            result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
        assert (result.outcome, result.failed_stage, result.setup_failed) == (Outcome.INFRA_FAILED, "prepare", True)
        assert says in result.detail
        return
    assert says in await rolled(tmp_path, Odd(answer), deadline_s=2)


async def test_an_infinite_reward_is_none_and_the_servers_fatal_finding_is_not_ours(tmp_path):
    """The server judges its own capture, which has no token ids; ours has."""
    told = {"ok": True, "trial_name": "t", "task_name": "moon", "rewards": {}, "findings": ["[FATAL] no ids"]}
    text = json.dumps({**told, "reward": float("inf")})
    async with serving(Odd(text).app) as config, meaning(tmp_path, ScriptedEngine("moon"), config) as means:
        (task,) = await means.server.tasks()
        result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None)
    assert any("reward_not_finite" in finding for finding in result.findings)
    assert "server: [FATAL] no ids" in result.findings


def test_a_server_elsewhere_needs_an_address_of_our_gateway():
    there = OpenEnvHarborConfig(url="https://me-harbor.hf.space")
    with pytest.raises(ConfigError, match="--gateway.public-url"):
        require_reachable(there, None)
    require_reachable(there, "https://tunnel.example")
    require_reachable(OpenEnvHarborConfig(url="http://localhost:8200"), None)
