# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer[ors]", "uvicorn"]
# ///
"""An ORS echo server, and training on it: the model wins by calling `echo` with the word of its task.

The server is that of OpenReward's guide for TRL, with more words. Served and trained on in one go:

    python examples/white_box/ors_echo.py --model smollm2 --run-dir runs/ors-echo

or in two, as with any ORS server:

    python examples/white_box/ors_echo.py --serve --port 8000
    harness-trainer train --tasks ors:http://127.0.0.1:8000 --model smollm2 --run-dir runs/ors-echo

`--env.num-tasks 4`, `--env.indices 0-2,7`, `--env.split test` choose tasks. Under TRL's own trainer, the same server:

    from harness_trainer.loops.ors.spec import OrsSpec

    spec = OrsSpec("http://127.0.0.1:8000", num_tasks=4)
    GRPOTrainer(..., train_dataset=spec.train_dataset, environment_factory=spec.environment_factory,
                reward_funcs=spec.reward_funcs)
"""

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
WORDS = {"train": ["hello", "world", "apple", "river", "stone", "cloud", "paper", "light"], "test": ["green", "seven"]}


class EchoTaskSpec(BaseModel):
    target: str


class EchoParams(BaseModel):
    text: str


class EchoEnvironment(Environment):
    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec or {})
        self.config = EchoTaskSpec.model_validate(task_spec)

    @classmethod
    def list_splits(cls) -> list[str]:
        return list(WORDS)

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"target": word} for word in WORDS[split]]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"Echo '{self.config.target}' to win.")]

    @tool
    async def echo(self, params: EchoParams) -> ToolOutput:
        """Submit a string. Reward 1.0 + finished if it matches the target.

        Args:
            text: The string to echo back.
        """
        correct = params.text == self.config.target
        return ToolOutput(
            blocks=[TextBlock(text="match" if correct else "no match")],
            reward=1.0 if correct else 0.0,
            finished=correct,
        )


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
        Server([EchoEnvironment]).run(host="127.0.0.1", port=args.port or 8000)
        return 0
    with local_server(args.port) as url:
        return subprocess.run([*TRAIN, "--tasks", f"ors:{url}", *rest], check=False).returncode


@contextlib.contextmanager
def local_server(port: int = 0) -> Iterator[str]:
    """The address of this file's own server, in a thread."""
    import uvicorn

    app = Server([EchoEnvironment]).app
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
