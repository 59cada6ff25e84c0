"""A real OpenEnv MCP server, for the tests: its tools are FastMCP's, its rewards the environment's."""

from __future__ import annotations

import os
from typing import Any

from fastmcp import FastMCP
from fastmcp.utilities.types import Image
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Speaking(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("speaking")
        self.said: list[str] = []

        @server.tool
        def say(words: str, loud: bool = False) -> str:
            """Say something, perhaps loudly."""
            if words == "nothing":
                raise ValueError("say something")
            self.said.append(words)
            return words.upper() if loud else words

        @server.tool
        def look() -> Image:
            """Look around."""
            return Image(data=b"\x89PNG", format="png")

        super().__init__(server)

    def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Observation:
        self.said.clear()
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(reward=0.0)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(seen, CallToolObservation) and action.tool_name == "say":
            seen.reward = float(len(self.said))
            seen.done = len(self.said) == 3
        return seen

    @property
    def state(self) -> State:
        return State(step_count=len(self.said))


app = create_fastapi_app(
    Speaking,
    CallToolAction,
    CallToolObservation,
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "4")),
)
