"""Agents that Harbor installs and drives: `--harness harbor:terminus-2`, or `harbor:` in an adapter's file.

Owns what such a spec means, where Harbor's own Python is, and the question to the real Harbor whether an agent can be
had. Its rollouts are run by `rollouts.harbor_run` through `harbor_worker`. Called by `load_harness` and
`ensure_installed`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.harnesses.base import Harness, render, render_env
from harness_trainer.harnesses.trial import TYPICAL
from sandboxes.harbor import PYTHON_VARIABLE, SETUP

PREFIX = "harbor:"
WORKER = Path(__file__).with_name("harbor_worker")  # a folder that Python runs as a program
_TRY_S = 180.0  # Harbor is a large program to import, on a busy machine
# What an agent is told to leave alone when nobody says otherwise: recordings need a program and the network, summaries
# rewrite what is trained.
_TOLD_OFF: Mapping[str, Mapping[str, Any]] = {
    "terminus-2": {"record_terminal_session": False, "enable_summarize": False, "suppress_max_turns_warning": True},
}
# Agents that take a base URL only together with what is spoken there.
_API_FORMATS: Mapping[str, str] = {"pi": "openai_chat_completions"}
# Of this machine, for Harbor and the agents that call the model from here: no keys, no logins, no proxies.
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
_QUIET = {"HARBOR_TELEMETRY": "0", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONUNBUFFERED": "1"}


def harbor_harness(spec: str, like: Harness | None) -> Harness:
    """The harness of `harbor:<agent>` or `harbor:<module>:<Class>`; whether Harbor has it, `check_agent` finds out.

    `like` is our own adapter of the same agent, None = we have none. Raises ConfigError when there is no name.
    """
    agent = spec.removeprefix(PREFIX).strip()
    if not agent:
        raise ConfigError(f"harness {spec!r} names no agent: write harbor:terminus-2, or harbor:my_module:MyAgent")
    return Harness.model_validate(
        {
            "name": f"{PREFIX}{agent}",
            "harbor": {"agent": agent},
            **({} if like is None else {"dialect": like.dialect, "closed_status": like.closed_status}),
            "needs": "Harbor (`harness-trainer setup harbor`), and the agent or a way to install it in the sandbox",
            "notes": "installed, started and told its settings by Harbor",
        }
    )


def order_for(harness: Harness, values: Mapping[str, str | int]) -> dict[str, Any]:
    """What Harbor is told of the agent, placeholders filled in; `harbor_worker.agent.Order` names the fields."""
    harbor = harness.harbor
    if harbor is None:
        raise ValueError(f"harness {harness.name} is not Harbor's")
    return {
        "agent": harbor.agent,
        "options": {**_TOLD_OFF.get(harbor.agent, {}), **render(harbor.options, values)},
        "provider": harbor.provider,
        "api_format": harbor.api_format or _API_FORMATS.get(harbor.agent),
        # What we have installed ourselves is there.
        "skip_install": True if harness.install is not None and harbor.skip_install is None else harbor.skip_install,
        "calls_from": harbor.calls_from,
        "env": render_env(harness, values),
        "model": str(values["model"]),
    }


def find_harbor() -> Path:
    """The interpreter of the environment that holds Harbor. Raises SetupError when it is not there."""
    named = os.environ.get(PYTHON_VARIABLE) or str(Path(__file__).parents[2] / ".venv-harbor" / "bin" / "python")
    found = shutil.which(named)
    if found is None:
        raise SetupError(
            f"Harbor is not installed ({named} does not exist): {SETUP}, or name a Python 3.12 that has it in "
            f"{PYTHON_VARIABLE}"
        )
    return Path(found).absolute()


def worker_env(home: Path) -> dict[str, str]:
    """The whole environment of Harbor's Python. `home` is an empty folder: logins of this user are not the agent's."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**kept, **_QUIET, "HOME": str(home)}


def check_agent(harness: Harness) -> None:
    """Ask the real Harbor whether it has the agent and takes its options.

    Raises ConfigError, with the agents that it knows, and SetupError when there is no Harbor that works.
    """
    order = order_for(harness, TYPICAL)
    python = find_harbor()
    argv = [str(python), "-P", str(WORKER), "check", json.dumps(order)]
    try:
        asked = subprocess.run(
            argv,
            cwd="/",  # neither the caller's folder nor the runner's: what is found here is found there
            env=worker_env(Path("/nonexistent")),
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"Harbor ({python}) did not answer in {_TRY_S:.0f} s; try again on an idle machine") from error
    except OSError as error:
        raise SetupError(f"{python} cannot be run: {error}") from error
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"{python} cannot run Harbor: {why}; {SETUP}")
    problem = json.loads(asked.stdout.splitlines()[-1])["problem"]
    if problem:
        raise ConfigError(f"harness {harness.name}: {problem}")
