# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer[ors]", "uvicorn"]
# ///
"""An ORS task set in which each task has tools of its own: what the model may call depends on the task it was given.

A small warehouse: every task can `look`; one asks for an amount (`submit(amount)`), one for a place (`submit(place)`:
the same name, other arguments), one has a `count` tool beside it. The model is shown the list of its own session.

    python examples/white_box/ors_task_tools.py --model smollm2 --run-dir runs/ors-task-tools
    python examples/white_box/ors_task_tools.py --serve --port 8000
    harness-trainer train --tasks ors:http://127.0.0.1:8000 --model smollm2 --run-dir runs/ors-task-tools

Under TRL's own trainer `OrsSpec("http://127.0.0.1:8000")` makes an environment of each different list of tools.
"""

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

from openreward.environments import Environment, Server, TextBlock, ToolOutput, ToolSpec, tool
from openreward.environments.types import ListToolsOutput, RunToolError, RunToolOutput, RunToolSuccess
from pydantic import BaseModel, ValidationError

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
STOCK = {"left": 3, "middle": 8, "right": 5}
Place = Literal["left", "middle", "right"]


class Amount(BaseModel):
    amount: int


class Where(BaseModel):
    place: Place


class Shelf(BaseModel):
    shelf: Place


TASKS: list[dict[str, Any]] = [
    {"question": "How many boxes are on the middle shelf?", "answer": 8, "submit": "amount"},
    {"question": "Which shelf has the fewest boxes?", "answer": "left", "submit": "place"},
    {"question": "How many boxes are there on all shelves?", "answer": 16, "submit": "amount", "counts": True},
]


class Warehouse(Environment):
    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec or {})
        self.task = dict(task_spec)

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return TASKS

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"{self.task['question']} Look, then submit your answer.")]

    @tool
    async def look(self) -> ToolOutput:
        """See all shelves."""
        return _said(", ".join(f"{place}: {boxes} boxes" for place, boxes in STOCK.items()))

    async def list_task_tools(self) -> ListToolsOutput:
        """Beside the shared ones, which every task has."""
        model = Amount if self.task["submit"] == "amount" else Where
        tools = [ToolSpec(name="submit", description="Give your answer.", input_schema=model.model_json_schema())]
        if self.task.get("counts"):
            counted = Shelf.model_json_schema()
            tools.append(ToolSpec(name="count", description="Count the boxes of a shelf.", input_schema=counted))
        return ListToolsOutput(tools=tools)

    async def _call_tool(self, name: str, input: Any) -> RunToolOutput:
        """The SDK finds methods of its own; the two above are made for a task."""
        try:
            if name == "submit":
                given = next(
                    iter((Amount if self.task["submit"] == "amount" else Where)(**input).model_dump().values())
                )
                correct = given == self.task["answer"]
                return _ok(_said("right" if correct else "wrong", reward=float(correct), finished=True))
            if name == "count" and self.task.get("counts"):
                return _ok(_said(str(STOCK[Shelf(**input).shelf])))
        except ValidationError as error:
            return RunToolOutput(RunToolError(error=str(error), reason="input_validation"))
        return await super()._call_tool(name, input)


def _said(text: str, **more: Any) -> ToolOutput:
    return ToolOutput(blocks=[TextBlock(text=text)], **more)


def _ok(output: ToolOutput) -> RunToolOutput:
    return RunToolOutput(RunToolSuccess(output=output))


# -- running it --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Serve, or serve and train on it with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="only serve, and train nothing")
    parser.add_argument(
        "--port", type=int, default=0, help="where to serve (default: any free port; 8000 to serve only)"
    )
    args, rest = parser.parse_known_args()
    if args.serve:
        Server([Warehouse]).run(host="127.0.0.1", port=args.port or 8000)
        return 0
    with local_server(args.port) as url:
        return subprocess.run([*TRAIN, "--tasks", f"ors:{url}", *rest], check=False).returncode


@contextlib.contextmanager
def local_server(port: int = 0) -> Iterator[str]:
    """The address of this file's own server, in a thread."""
    import uvicorn

    app = Server([Warehouse]).app
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise SystemExit("the environment's server did not start; its error is above")
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    sys.exit(main())
