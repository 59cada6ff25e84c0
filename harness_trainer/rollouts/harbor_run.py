"""One rollout of an agent that Harbor drives: set up, run, its logs kept; its commands and files are the sandbox's.

Owns the order of the calls, their limits, and how an end is told as a `RunResult`. The process that drives the agent is
`harbor`'s. Called by `agents`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness_trainer.errors import DriverFailed
from harness_trainer.harnesses.harbor_agent import order_for
from harness_trainer.rollouts.harbor import HarborAgents
from harness_trainer.rollouts.harbor_link import Link, LinkBroken, Message, Refused
from harness_trainer.rollouts.place import Place
from sandboxes.base import Command, NetworkMode, RunResult, SandboxError, SetupFailed

_CANCEL_S = 4.0  # for an agent to end when its time is over; what it left in the sandbox is ended later anyway
_COLLECT_S = 8.0  # for its logs; together less than a rollout's grace
_LOGS_CAP = 64_000_000  # bytes
_ARGUMENT_CAP = 128 * 1024 - 1  # bytes; Linux takes no longer one
_FOLDER = "harbor"  # below a rollout's artifacts
# Harbor's commands are bash's; an image without it gets what it has.
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$0"; exec sh -c "$0"'


@asynccontextmanager
async def harbor_agent(place: Place, harbor: HarborAgents) -> AsyncIterator[HarborRun]:
    """The agent, set up. Its process ends when this is left, however far it is.

    Raises SetupFailed when Harbor cannot set it up in this sandbox, SandboxError, and DriverFailed.
    """
    folder = place.artifacts / _FOLDER
    await asyncio.to_thread(lambda: folder.mkdir(parents=True, exist_ok=True))
    async with harbor.process(place.rollout_id, folder / "worker.log") as sock:
        run = HarborRun(place, harbor)
        link = await Link.open(sock, _order(place, folder), run.serve)
        try:
            await run.set_up(link)
            yield run
        finally:
            await asyncio.shield(link.close())


def _order(place: Place, folder: Path) -> Message:
    gateway = place.boxes.access.gateway
    return {
        **order_for(place.harness, place.values),
        "rollout": place.rollout_id,
        "task": place.task.name,
        "folder": str(folder.absolute()),
        "workdir": place.sandbox.workdir,
        "public": _mode(place) is NetworkMode.PUBLIC,
        "token": place.session.token,
        "urls": {"sandbox": place.sandbox.gateway_url, "host": None if gateway is None else gateway.url},
        "sandbox_env": {"DO_NOT_TRACK": "1", **place.search_path(), **place.network_env()},
    }


def _mode(place: Place) -> NetworkMode:
    forced: NetworkMode | None = getattr(place.boxes.spec.sandbox, "network", None)
    return forced or place.boxes.spec_of(place.task).network.mode


class HarborRun:
    """See `agents.Agent`."""

    def __init__(self, place: Place, harbor: HarborAgents) -> None:
        self._place, self._harbor = place, harbor
        self._link: Link | None = None
        self._broken: SandboxError | None = None  # the first failure of the sandbox itself under a command
        self._oom = False

    async def set_up(self, link: Link) -> None:
        self._link = link
        try:
            await link.call("setup")
        except LinkBroken as error:
            raise await self._died() from error
        except Refused as error:
            if self._broken is not None:
                raise self._broken from error
            raise SetupFailed(f"Harbor could not set {self._place.harness.name} up: {error}{self._hint()}") from error

    def _hint(self) -> str:
        if _mode(self._place) is not NetworkMode.PROXY_ONLY:
            return ""
        return (
            " -- nothing can be installed in a sandbox that reaches the gateway alone: use an image that has the agent "
            "(and skip_install: true), or give the task network mode allowlist or public"
        )

    async def run(self, limit_s: float) -> RunResult:
        assert self._link is not None
        began = time.monotonic()
        number, answer = self._link.begin("run", instruction=self._place.task.instruction)
        done, _ = await asyncio.wait([answer], timeout=limit_s)
        timed_out = not done
        if timed_out:
            self._link.cancel(number)
            await asyncio.wait([answer], timeout=_CANCEL_S)
        error = "" if timed_out else await self._ended(answer)
        lost = await self._collect()
        return RunResult(
            exit_code=None if timed_out else answer.result()["exit_code"],
            stdout="",
            stderr="\n".join(filter(None, (error, lost))),
            timed_out=timed_out,
            truncated=False,
            duration_s=time.monotonic() - began,
            oom=self._oom,
        )

    async def _ended(self, answer: asyncio.Future[Message]) -> str:
        """What the agent ended with; "" = well. Raises when it was not its own end."""
        try:
            error = str((await answer)["error"])
        except LinkBroken as broken:
            raise await self._died() from broken
        except Refused as refused:
            raise DriverFailed(f"Harbor could not run {self._place.harness.name}: {refused}") from refused
        if error and self._broken is not None:
            raise self._broken
        return error

    async def _collect(self) -> str:
        """Bring the agent's logs over; one line about what was in the way."""
        assert self._link is not None
        try:
            async with asyncio.timeout(_COLLECT_S):
                await self._link.call("collect")
        except (LinkBroken, Refused, TimeoutError) as error:
            return f"harness-trainer: what Harbor's agent logged could not all be kept: {error or type(error).__name__}"
        return ""

    async def _died(self) -> DriverFailed:
        how, last = await self._harbor.last_words(
            self._place.rollout_id, self._place.artifacts / _FOLDER / "worker.log"
        )
        return DriverFailed(f"the process in which Harbor drove {self._place.harness.name} {how}: {last}")

    # --- what the agent asks of the sandbox ---

    async def serve(self, request: Message) -> Message:
        sandbox = self._place.sandbox
        match request["op"]:
            case "exec":
                return await self._exec(request)
            case "upload_file":
                await sandbox.put_file(Path(request["source"]), self._inside(request["target"]))
            case "upload_dir":
                await sandbox.put_dir(Path(request["source"]), self._inside(request["target"]))
            case "download_file":
                await sandbox.get_file(self._inside(request["source"]), Path(request["target"]), cap=_LOGS_CAP)
            case "download_dir":
                await sandbox.get_dir(self._inside(request["source"]), Path(request["target"]), cap=_LOGS_CAP)
        return {}

    async def _exec(self, request: Message) -> Message:
        if why := _not_to_be_given(request):
            return {"code": 126, "out": "", "err": f"sh: cannot execute the command: {why}\n", "timed_out": False}
        cwd = request["cwd"]
        command = Command(
            argv=["sh", "-c", _SHELL, request["command"]],
            cwd=None if cwd is None else self._inside(cwd),
            env=request["env"],
            timeout_s=request["timeout_s"] or None,
            # Where there is one user only, what Harbor would do as root is tried as that one.
            user=request["user"] if self._harbor.users else None,
        )
        try:
            ran = await self._place.sandbox.run(command)
        except SandboxError as error:
            self._broken = self._broken or error
            raise
        self._oom = self._oom or ran.oom
        return {"code": ran.exit_code, "out": ran.stdout, "err": ran.stderr, "timed_out": ran.timed_out}

    def _inside(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._place.sandbox.workdir}/{path}"


def _not_to_be_given(request: Message) -> str:
    """Why no system could give a shell this command; "" = it can. Models type it: the agent is answered, as by a shell,
    and its sandbox is not at fault."""
    texts = [request["command"], request["cwd"] or "", *request["env"], *request["env"].values()]
    if any("\0" in text for text in texts):
        return "it has a NUL byte"
    try:
        longest = max(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        return "it has half a character (a lone surrogate)"
    return "argument list too long" if longest > _ARGUMENT_CAP else ""
