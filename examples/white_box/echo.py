# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer", "openenv==0.10.0", "uvicorn"]
# ///
r"""Echo: the environment says back what it is told, and the longer it is the more it earns.

The smallest environment class: one OpenEnv client per episode, one tool, one reward function.

    python examples/white_box/echo.py --local --two-cores --run-dir runs/echo

With --two-cores a small model (SmolLM2-135M) learns it on a CPU in minutes, which `python -m benchmarks.echo` measures;
leave it out to choose model and sizes by the flags of `harness-trainer train`. Without --local it is played in the
Space whose address is below; many rollouts at once need a copy of your own, with MAX_CONCURRENT_ENVS set. The class is
the one of OpenEnv's guide:

    harness-trainer train --env class:examples/white_box/echo.py:EchoEnv \
        --env.rewards examples/white_box/echo.py:reward_length --tasks echo-rows.jsonl ...
    harness-trainer train --env openenv:local:examples/white_box/echo.py:app --tasks echo-rows.jsonl ...
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
ECHO_URL = "https://openenv-echo-env.hf.space"
PROMPT = "Try to echo 'Hello World!' in the environment."
# A model of 135M parameters calls no tool that it is only told of; it is shown four calls before its own.
SHOWN_PROMPT = "Echo a message in the environment."
SHOWN = ("Good morning!", "It works today.", "How are you, my friend?", "I like the sun.")
# One call is all that an episode needs: its length is what is rewarded.
TWO_CORES: dict[str, Any] = {
    "model": "smollm2",
    "rollouts": {"group_size": 8, "max_concurrent": 16, "max_turns": 1, "max_tokens": 64},
    "learner": {
        "max_steps": 18,
        "groups_per_step": 2,
        "max_staleness": 1,
        "learning_rate": 5e-5,
        "token_budget": 4096,
        "save_steps": 18,
    },
    "engine": {"max_model_len": 1024},
}


class EchoEnv:
    """What the model plays."""

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient

        self.client = GenericEnvClient(base_url=os.environ.get("ECHO_URL", ECHO_URL))
        self.reward = 0.0

    def reset(self, **columns: Any) -> str | None:
        self.client.reset()
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        result = self.client.step({"message": message})
        self.reward = result.reward
        return str(result.observation["echoed_message"])


def reward_length(environments: list[EchoEnv], **kwargs: Any) -> list[float | None]:
    return [environment.reward for environment in environments]


def rows(count: int = 64, *, shown: bool = False) -> list[dict[str, Any]]:
    """`shown`: with calls before the model's own, for one that would make none."""
    if not shown:
        return [{"prompt": [{"role": "user", "content": PROMPT}]}] * count
    prompt: list[dict[str, Any]] = []
    for message in SHOWN:
        function = {"name": "echo", "arguments": json.dumps({"message": message})}
        call = {"id": "shown", "type": "function", "function": function}
        prompt.append({"role": "user", "content": SHOWN_PROMPT})
        prompt.append({"role": "assistant", "content": None, "tool_calls": [call]})
    return [{"prompt": [*prompt, {"role": "user", "content": SHOWN_PROMPT}]}] * count


# -- the server, as the Space runs it ----------------------------------------------------------------------------------


def app() -> Any:
    """An OpenEnv server of Echo. OpenEnv is imported here: it takes seconds, and the class above needs none of it."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class EchoAction(Action):
        """Echo the message back."""

        message: str

    class EchoObservation(Observation):
        echoed_message: str = ""
        message_length: int = 0

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
            self._state = State(episode_id=episode_id)
            return EchoObservation(echoed_message="Echo environment ready!")

        def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
            self._state.step_count += 1
            length = len(action.message)
            return EchoObservation(echoed_message=action.message, message_length=length, reward=length * 0.1)

        @property
        def state(self) -> State:
            return self._state

    places = int(os.environ.get("MAX_CONCURRENT_ENVS", "64"))
    return create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=places)


# -- running it --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Write the rows, and train on them with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--two-cores", action="store_true", help="a small model, with settings for a CPU")
    parser.add_argument("--local", action="store_true", help="serve the environment here, not in the Space")
    parser.add_argument("--rows", type=Path, default=Path("echo-rows.jsonl"), help="where to write the rows")
    args, rest = parser.parse_known_args()
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows(shown=args.two_cores)))
    here = Path(__file__).resolve()
    with local_server() if args.local else contextlib.nullcontext(ECHO_URL) as url:
        command = [*TRAIN, "--env", f"class:{here}:EchoEnv", "--tasks", str(args.rows)]
        rewards = ",".join(f"{here}:{reward.__name__}" for reward in (reward_length,))
        command += ["--env.rewards", rewards, *(flags(TWO_CORES) if args.two_cores else []), *rest]
        return subprocess.run(command, env={**os.environ, "ECHO_URL": url}, check=False).returncode


def flags(settings: dict[str, Any], where: str = "--") -> list[str]:
    """As `harness-trainer train` takes them; what a person gives after them counts more."""
    found: list[str] = []
    for name, value in settings.items():
        flag = where + name.replace("_", "-")
        found += flags(value, f"{flag}.") if isinstance(value, dict) else [flag, str(value)]
    return found


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """The address of this file's own server, in a thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app(), host="127.0.0.1", port=0, log_level="warning"))
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
