"""A real ORS server for the tests, made with the SDK's own `Server`. `python ors_environments.py PORT NAME...` serves
those environments, the first one as the default. Started by `ors_server.running`.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
from openreward.environments import Environment, ImageBlock, Server, TextBlock, ToolOutput, terminal, tool
from openreward.environments.types import ListToolsOutput, Message, RunToolOutput, RunToolSuccess, ToolSpec
from pydantic import BaseModel, Field


def said(text: str, **more: Any) -> ToolOutput:
    return ToolOutput(blocks=[TextBlock(text=text)], **more)


counts = {"created": 0, "torn_down": 0, "slow_runs": 0, "pings": 0}


class Text(BaseModel):
    text: str


class Base(Environment):
    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec or {})
        self.spec, self.secrets = task_spec or {}, secrets or {}
        counts["created"] += 1

    def teardown(self) -> None:
        counts["torn_down"] += 1

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train", "test"]

    def get_prompt(self) -> Any:
        return [TextBlock(text=f"Do {self.spec}.")]


class EchoEnvironment(Base):
    """The guide's server, with tools for what else a server can answer."""

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        train = [{"target": word, "difficulty": n, "prompt": "mine"} for n, word in enumerate(["hello", "world"])]
        return train if split == "train" else [{"target": "held out"}]

    def get_prompt(self) -> Any:
        return [TextBlock(text=f"Echo '{self.spec['target']}' to win.")]

    @tool
    async def echo(self, params: Text) -> ToolOutput:
        """Submit a string.

        Args:
            text: The string to echo back.
        """
        correct = params.text == self.spec["target"]
        return said("match" if correct else "no match", reward=1.0 if correct else 0.0, finished=correct)

    @tool
    async def look(self) -> ToolOutput:
        """No reward."""
        return said("nothing here", metadata={"seen": 1})

    @tool
    async def fail(self) -> ToolOutput:
        """Raises."""
        raise ValueError(f"broken with {self.secrets.get('MY_SECRET', 'no secret')}")

    @tool
    async def reveal(self) -> ToolOutput:
        """Shows a secret."""
        return said(f"the secret is {self.secrets.get('MY_SECRET')}")

    @tool
    async def picture(self) -> ToolOutput:
        """An image."""
        return ToolOutput(blocks=[TextBlock(text="see"), ImageBlock(data="aGk=", mimeType="image/png")])

    @tool
    async def long(self) -> ToolOutput:
        """Long, with spaces everywhere, so that the border of a piece falls on some."""
        return said("a  b " * 20_000)

    @tool
    async def slow(self) -> ToolOutput:
        """Takes a while, and counts its runs."""
        counts["slow_runs"] += 1
        await asyncio.sleep(1.5)
        return said("done", reward=0.5)


class PathChoice(BaseModel):
    path: str
    force: bool


class Number(BaseModel):
    x: int


class Tasks(Base):
    """B44: what each task offers is its own; task 2 cannot be set up."""

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{"n": n} for n in range(3)]

    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec, secrets)
        if self.spec["n"] == 2:
            raise RuntimeError("no machine for this one")

    @tool
    async def read(self) -> ToolOutput:
        """Shared."""
        return said("read")

    async def list_task_tools(self) -> Any:
        schemas = {"submit": Number} if self.spec["n"] == 0 else {"submit": PathChoice, "probe": Text}
        return ListToolsOutput(
            tools=[
                ToolSpec(name=name, description=f"{name} of task", input_schema=model.model_json_schema())
                for name, model in schemas.items()
            ]
        )

    @tool(shared=False)
    async def probe(self, params: Text) -> ToolOutput:
        """Of task 1."""
        return said(f"probed {params.text}")

    async def _call_tool(self, name: str, input: Any) -> Any:
        if name == "submit":
            return RunToolOutput(RunToolSuccess(output=said(f"submitted {dict(input)}", reward=1.0, finished=True)))
        return await super()._call_tool(name, input)


class Inner(BaseModel):
    names: list[str]
    mode: str | None = Field(None, json_schema_extra={"enum": ["a", "b", None]})


class Rich(BaseModel):
    inner: Inner
    many: list[Inner] = []
    from_: str = Field(alias="from", description="where it comes from")
    limit: int | None = None


class Schemas(Base):
    """Arguments that are nested, with references, choices and Python's own words."""

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{}]

    @tool
    async def send(self, params: Rich) -> ToolOutput:
        """Send it."""
        return said(params.model_dump_json(by_alias=True), reward=1.0)


class Answers(Base):
    """The model's last message is its answer."""

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{}]

    def get_messages(self) -> Any:
        blocks = [TextBlock(text="2 + 2?")]
        return [Message(role="system", blocks=[TextBlock(text="Be brief.")]), Message(role="user", blocks=blocks)]

    @tool
    async def think(self) -> ToolOutput:
        """Nothing."""
        return said("hm")

    @terminal
    @tool
    async def answer(self, params: Text) -> ToolOutput:
        """Hidden."""
        return said("graded", reward=1.0 if "4" in params.text else 0.0, finished=True)


KNOWN = {cls.__name__.lower(): cls for cls in (EchoEnvironment, Tasks, Schemas, Answers)}


def serve(port: int, names: list[str]) -> None:
    server = Server([KNOWN[name] for name in names])

    @server.app.get("/health/counts")
    async def told() -> Mapping[str, int]:
        return {**counts, "open": len(server._active_envs)}

    @server.app.middleware("http")
    async def count_pings(request: Any, call_next: Any) -> Any:
        counts["pings"] += request.url.path == "/ping"
        return await call_next(request)

    uvicorn.run(server.app, host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
