"""One rollout, in a process of its own: what its agent is asked to do. Called by `worker`, in the new process."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import traceback

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.context import AgentContext

from .agent import Order, agent_class, make_agent
from .peer import Message, Peer
from .sandbox import Sandbox

_MAX_LINE = 256_000_000  # bytes; the largest are chunks of output
_EXIT_CODE = re.compile(r"Command failed \(exit (\d+)\)")  # as Harbor words the end of an agent's own program


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


async def drive(sock: socket.socket) -> None:
    """One rollout, until the other side closes its socket."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=_MAX_LINE)
    peer = Peer(writer)
    order: Order = json.loads(await reader.readline())
    Rollout(peer, order)
    await peer.read(reader)
