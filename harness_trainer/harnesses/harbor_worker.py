"""The half of the agents' bridge to Harbor that runs in Harbor's own Python (3.12): makes agents and drives them.

Run as a script, never imported by us: `check ORDER` says whether Harbor has an agent, as {"problem": "one line"} in the
last line of its output; `serve FD` is the worker of a run. FD is a socket of packets:

    {"version": "0.26.0"}                      ours, first
    {"fork": "r1", "log": PATH} with one FD    a rollout's process, whose socket the FD is; it prints into the log
    {"kill": "r1"}                             end it and what it started
    {"ended": "r1", "status": -9}              ours: it has ended, with that exit code or by that signal

Each rollout has a process of its own, forked from one that has imported Harbor already: agents block, read and change
`os.environ`, and call models from here; none must see or hold up another. On a rollout's socket are JSON lines, the
first the `Order`. After it either side calls the other: {"call": 1, "op": "run", ...} is answered by {"answer": 1,
"value": {...}} or {"answer": 1, "error": "one line", "kind": "..."}, and {"cancel": 1} ends a call, which is answered
all the same. We are asked to `setup`, `run` and `collect`; we ask for the commands and files of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import re
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harbor.agents.agent_auth_resolution import PROVIDERS
from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext
from harbor.models.model_api_format import ModelApiFormat
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.paths import TrialPaths

_MAX_LINE = 256_000_000  # bytes; the largest are chunks of output
_MAX_PACKET = 65_536
_MAX_FILE = 1_000_000_000  # bytes that a rollout's process may write to one file: an agent may flood its log
_EXIT_CODE = re.compile(r"Command failed \(exit (\d+)\)")  # as Harbor words the end of an agent's own program

Message = dict[str, Any]
# What `harbor_agent.order_for` says of the agent, and of the rollout: folder, network, base_url of either side, token,
# and the environment of every command.
Order = dict[str, Any]


# --- the agent -----------------------------------------------------------------------------------------------------


def agent_class(order: Order) -> type[BaseAgent]:
    """Raises ValueError, with the names that Harbor knows."""
    name = order["agent"]
    if ":" not in name and name not in AgentFactory.registered_names():
        known = ", ".join(AgentFactory.registered_names())
        raise ValueError(f"Harbor has no agent {name!r}: it knows {known}; or give a class of yours as module:Class")
    found: type[BaseAgent] = AgentFactory.get_agent_class_from_config(AgentConfig(name=name))
    if not issubclass(found, BaseAgent):
        raise ValueError(f"{name} is no agent: it must be a subclass of harbor.agents.base.BaseAgent")
    spec = found.MODEL_CONNECTION
    if ":" not in name and (spec is None or not found.capabilities.base_url):
        raise ValueError(f"Harbor cannot give the agent {name!r} another model endpoint, so it cannot be captured")
    return found


def calls_from_here(found: type[BaseAgent], order: Order) -> bool:
    if order["calls_from"] is not None:
        return bool(order["calls_from"] == "host")
    return not issubclass(found, BaseInstalledAgent)


def agent_config(found: type[BaseAgent], order: Order) -> AgentConfig:
    """The model connection is the gateway; the session's token is the only key."""
    spec = found.MODEL_CONNECTION
    provider = order["provider"] or (spec and spec.default_provider) or "openai"
    access = PROVIDERS.get(provider)
    keys = list(access.api_key_candidate_names if access else [])
    keys += spec.agent_provider_access.api_key_candidate_names if spec else []
    url = order["urls"]["host" if calls_from_here(found, order) else "sandbox"]
    if url is None:
        raise ValueError("this machine has no address of the gateway, and the agent calls its model from here")
    url += _base_path(found, provider, order["api_format"])
    env = {keys[0] if keys else "OPENAI_API_KEY": order["token"]}
    if spec is None:  # a class that takes no connection reads the provider's usual variables
        env |= dict.fromkeys(access.base_url_candidate_names if access else ["OPENAI_BASE_URL"], url)
    options = dict(order["options"])
    if issubclass(found, BaseInstalledAgent) and order["skip_install"]:
        options["skip_install"] = True
    return AgentConfig(
        name=order["agent"],
        model_name=f"{provider}/{order['model']}",
        base_url=None if spec is None else url,
        model_api_format=None if order["api_format"] is None else ModelApiFormat(order["api_format"]),
        env={**env, **order["env"]},
        kwargs=options,
    )


def _base_path(found: type[BaseAgent], provider: str, api_format: str | None) -> str:
    """What the provider's own base URL has after the host: some clients add `/v1` themselves, some want it there."""
    spec = found.MODEL_CONNECTION
    access = PROVIDERS.get(provider)
    url = access.base_url if access is not None else None
    if spec is not None:
        natives = spec.default_api_format_by_provider
        spoken = api_format or natives.get(provider, natives.get("default"))
        url = spec.default_base_url(provider, ModelApiFormat(spoken) if spoken else None) or url
    return "/v1" if url is None else urlsplit(url).path.rstrip("/")


def make_agent(found: type[BaseAgent], order: Order, logs: Path) -> BaseAgent:
    """Raises what Harbor's classes raise for options and connections that they do not take."""
    agent: BaseAgent = AgentFactory.create_agent_from_config(
        agent_config(found, order), logs_dir=logs, logger=logging.getLogger("agent")
    )
    agent.session_id = f"{order['rollout']}__agent"
    return agent


def check(order: Order) -> str:
    """Why the agent cannot be had, in one line; "" = it can, as far as can be told without a sandbox."""
    nowhere = {"rollout": "check", "token": "t", "urls": dict.fromkeys(("host", "sandbox"), "http://127.0.0.1:9")}
    try:
        found = agent_class(order)
        if order["skip_install"] and not issubclass(found, BaseInstalledAgent):
            return "skip_install is for agents that Harbor installs, and it installs nothing for this one; leave it out"
        with tempfile.TemporaryDirectory() as logs:
            agent = make_agent(found, {**order, **nowhere}, Path(logs))
            if found.MODEL_CONNECTION is not None and agent.model_connection.api_key != nowhere["token"]:
                return "Harbor does not give this agent the key that it is told; name its provider in `provider`"
    except (Exception, SystemExit) as error:  # whatever somebody's module or class raises
        said = " ".join(str(error).split()) or type(error).__name__
        lost = said.startswith("Failed to import module")
        return f"{said}; PYTHONPATH must name its folder by a full path" if lost else said
    return ""


# --- the sandbox, as Harbor sees it --------------------------------------------------------------------------------


class Sandbox(BaseEnvironment):  # type: ignore[misc] # Harbor is not in this environment
    """Asks the other side for everything. It is started before us and ends after us."""

    def __init__(self, peer: Peer, order: Order) -> None:
        self._peer = peer
        folder = Path(order["folder"])
        paths = TrialPaths(folder)
        paths.agent_dir.mkdir(parents=True, exist_ok=True)
        mode = NetworkMode.PUBLIC if order["public"] else NetworkMode.NO_NETWORK
        super().__init__(
            environment_dir=folder,
            environment_name=order["task"],
            session_id=order["rollout"],
            trial_paths=paths,
            task_env_config=EnvironmentConfig(workdir=order["workdir"]),
            logger=logging.getLogger("harbor"),
            persistent_env=dict(order["sandbox_env"]),
            network_policy=NetworkPolicy(network_mode=mode),
        )

    @staticmethod
    def type() -> str:
        return "harness-trainer"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, network_allowlist=True)

    def _validate_definition(self) -> None:
        """There is no definition: the sandbox is there."""

    async def start(self, force_build: bool) -> None:
        """It is started."""

    async def stop(self, delete: bool) -> None:
        """It is not ours to stop."""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        as_user = self._resolve_user(user)
        ran = await self._peer.call(
            "exec",
            command=command,
            cwd=cwd,
            env=self._merge_env(env) or {},
            timeout_s=timeout_sec,
            user=None if as_user is None else str(as_user),
        )
        if ran["timed_out"]:  # as Harbor's own environments say it
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=ran["out"], stderr=ran["err"], return_code=ran["code"])

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._peer.call("upload_file", source=_absolute(source_path), target=str(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._peer.call("upload_dir", source=_absolute(source_dir), target=str(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._peer.call("download_file", source=str(source_path), target=_absolute(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._peer.call("download_dir", source=str(source_dir), target=_absolute(target_dir))


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)


# --- one rollout, in a process of its own --------------------------------------------------------------------------


class Rollout:
    """The agent of one rollout, and what it is asked to do."""

    def __init__(self, peer: Peer, order: Order) -> None:
        self._order = order
        self._found = agent_class(order)
        self._sandbox = Sandbox(peer, order)
        self._logs = self._sandbox.trial_paths.agent_dir
        self._context = AgentContext()
        self._agent: BaseAgent | None = None
        peer.serve({"setup": self.setup, "run": self.run, "collect": self.collect})

    @property
    def agent(self) -> BaseAgent:
        if self._agent is None:
            raise RuntimeError("the agent is not set up")
        return self._agent

    async def setup(self, _: Message) -> Message:
        self._agent = make_agent(self._found, self._order, self._logs)
        with self._sandbox.scoped_exec_env(self._agent.extra_env):
            if await self._is_there(self._agent):
                self._agent = make_agent(self._found, {**self._order, "skip_install": True}, self._logs)
            await self._agent.setup(self._sandbox)
        return {"version": self._agent.version()}

    async def _is_there(self, agent: BaseAgent) -> bool:
        """Whether to leave the installing out, where nobody has said."""
        if self._order["skip_install"] is not None or not isinstance(agent, BaseInstalledAgent):
            return False
        return bool(await agent.is_requested_version_installed(self._sandbox))

    async def run(self, request: Message) -> Message:
        with self._sandbox.scoped_exec_env(self.agent.extra_env):
            try:
                await self.agent.set_web_tools_disabled(True, self._sandbox)
                await self.agent.run(
                    instruction=request["instruction"], environment=self._sandbox, context=self._context
                )
            except (Exception, SystemExit) as error:  # the agent's own end, which is a result
                traceback.print_exc()
                exit_code = _EXIT_CODE.search(str(error))
                return {"exit_code": int(exit_code[1]) if exit_code else 1, "error": f"{type(error).__name__}: {error}"}
        return {"exit_code": 0, "error": ""}

    async def collect(self, _: Message) -> Message:
        """What the agent wrote to its logs, and what it says it used."""
        try:
            await self._sandbox.download_dir(str(self.agent.environment_logs_dir), self._logs)
            if self._context.is_empty():
                self.agent.populate_context_post_run(self._context)
        finally:
            text = self._context.model_dump_json(indent=1, exclude_none=True)
            (self._logs.parent / "context.json").write_text(text, encoding="utf-8")
        return {}


class Peer:
    """The talk with the other side."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ops: dict[str, Callable[[Message], Awaitable[Message]]] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._at_work: dict[int, asyncio.Task[None]] = {}
        self._num_calls = 0

    def serve(self, ops: dict[str, Callable[[Message], Awaitable[Message]]]) -> None:
        self._ops = ops

    def send(self, message: Message) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def call(self, op: str, **arguments: Any) -> Message:
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.send({"call": number, "op": op, **arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            self.send({"cancel": number})
            raise
        finally:
            del self._asked[number]

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Until the other side is gone."""
        while line := await reader.readline():
            message = json.loads(line)
            if "call" in message:
                self._at_work[message["call"]] = asyncio.create_task(self._answer(message))
            elif "cancel" in message:
                if (task := self._at_work.get(message["cancel"])) is not None:
                    task.cancel()
            elif (answer := self._asked.get(message["answer"])) is not None and not answer.done():
                if "value" in message:
                    answer.set_result(message["value"])
                else:
                    kind = FileNotFoundError if message["kind"] == "absent" else RuntimeError
                    answer.set_exception(kind(message["error"]))

    async def _answer(self, request: Message) -> None:
        number = request["call"]
        try:
            self.send({"answer": number, "value": await self._ops[request["op"]](request)})
        except asyncio.CancelledError:
            self.send({"answer": number, "error": "cancelled", "kind": "cancelled"})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            said = " ".join(str(error).split())[-2000:]
            self.send({"answer": number, "error": f"{type(error).__name__}: {said}", "kind": "failed"})
        finally:
            del self._at_work[number]


async def drive(sock: socket.socket) -> None:
    """One rollout, until the other side closes its socket."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=_MAX_LINE)
    peer = Peer(writer)
    order: Order = json.loads(await reader.readline())
    Rollout(peer, order)
    await peer.read(reader)


# --- the worker ----------------------------------------------------------------------------------------------------


class Worker:
    """Forks a process per rollout. No threads and no event loop here, or they would be half there in each of them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._rollouts: dict[int, str] = {}  # pid -> rollout
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the other side is gone, or SIGTERM."""
        try:
            control = self._control.fileno()
            while True:
                ready, _, _ = select.select([control, self._woken], [], [])
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._bury()
                if control in ready and not self._obey():
                    return
        finally:
            for pid in self._rollouts:
                _kill(pid)

    def _obey(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, _MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return False
        message = json.loads(packet)
        if "fork" in message:
            self._fork(message, fds[0])
        else:
            for pid in [pid for pid, rollout in self._rollouts.items() if rollout == message["kill"]]:
                _kill(pid)
        return True

    def _fork(self, message: Message, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: this rollout's bad luck
            os.close(fd)
            print(f"no process for rollout {message['fork']}: {error}", file=sys.stderr)
            self._tell_end(message["fork"], 1)
            return
        if pid == 0:
            code = 1
            try:
                self._become(message, fd)
                code = 0
            except BaseException:  # the log is all there is to tell of it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        os.close(fd)
        self._rollouts[pid] = message["fork"]

    def _become(self, message: Message, fd: int) -> None:
        """In the new process: nothing of the worker's stays open, and its output is its own."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        self._control.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE, _MAX_FILE))
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
        asyncio.run(drive(socket.socket(fileno=fd)))

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (rollout := self._rollouts.pop(ended[0], None)) is not None:
                    self._tell_end(rollout, os.waitstatus_to_exitcode(ended[1]))

    def _tell_end(self, rollout: str, status: int) -> None:
        self._control.send(json.dumps({"ended": rollout, "status": status}).encode())


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def main(args: list[str]) -> None:
    if args[0] == "check":
        problem = check(json.loads(args[1]))
        print(json.dumps({"problem": problem}))
        return
    from harbor.llms.litellm_config import litellm  # noqa: F401 - the slow half of an agent's start, once for all

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control = socket.socket(fileno=int(args[1]))
    control.send(json.dumps({"version": importlib.metadata.version("harbor")}).encode())
    Worker(control).serve()


if __name__ == "__main__":
    # A signal to the group that we were started in would also end the rollouts while they are being ended in order.
    os.setpgid(0, 0)
    main(sys.argv[1:])
