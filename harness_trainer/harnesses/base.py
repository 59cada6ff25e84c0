"""The contract of a harness: an agent as data.

A harness adapter states how an agent is installed, which files, environment and command it gets, which wire dialect it
speaks, what ends it, and how its own output is read. It holds no control flow; `rollouts.rollout` runs it. Strings may
hold `${name}` placeholders (see `PLACEHOLDERS`), filled per rollout by `render`; output is read by `reading`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_trainer.errors import ConfigError

# What an adapter may use, and what each stands for inside the sandbox.
PLACEHOLDERS: Mapping[str, str] = {
    "instruction": "the task's instruction text",
    "base_url": "the gateway's address without a path, e.g. http://127.0.0.1:41234",
    "token": "the session's token: the only secret the agent gets",
    "model": "the model name to ask for",
    "context": "the model's window in tokens",
    "max_tokens": "output cap of one reply in tokens",
    "max_turns": "model calls the gateway allows",
    "app": "the workspace folder",
    "home": "the HOME folder",
    "bin": "folder with the installed agent's programs",
    "python": "a python3 that is in the sandbox, with no more than the standard library",
    "agents": "folder with the agents that ship with harness-trainer",
}


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NpmInstall(_Data):
    """Installed once per cache with npm, never per rollout. `${bin}` is its node_modules/.bin."""

    type: Literal["npm"]
    packages: list[str] = Field(min_length=1)  # pinned, e.g. "opencode-ai@1.18.33"
    check: list[str] = Field(min_length=1)  # argv below bin/ that must exit 0 after installing
    # The Node.js that comes along, from npm as well ("24.22.3"), as `node` in `${bin}`; None = the agent is a native
    # program. A sandbox need not have one of its own.
    node: str | None = None
    # Of the check, which is the first start: where an agent then unpacks itself. May use `${bin}` only.
    env: dict[str, str] = Field(default_factory=dict)


class PipInstall(_Data):
    """Installed once per cache into a Python environment of its own, never per rollout. `${bin}` is its bin folder."""

    type: Literal["pip"]
    packages: list[str] = Field(min_length=1)  # pinned
    check: list[str] = Field(min_length=1)
    python: str = "3.11"  # the minor version that it runs on, here and in a sandbox with a root of its own


class Match(_Data):
    """Picks values out of an agent's output: `field` (dotted) of each JSON object that has all of `where`.

    Names in `where` and `field` are dotted; `*` stands for every item of a list. `where` values are compared as JSON.
    Example: Match(where={"type": "text"}, field="part.text").
    """

    where: dict[str, Any] = Field(default_factory=dict)
    field: str
    begins: str = ""  # only texts that begin with this: agents report errors as if the model had said them
    joined: bool = False  # texts of events that follow one another are pieces of one value: it prints as it streams


class Output(_Data):
    """How the agent's own words on standard output are read; `reading` does it.

    `jsonl`: JSON objects, one a line, among whatever else it prints. `json`: one JSON document, from the first line
    that begins one. `text`: all of it is the final message. Each list is tried in order; what none matches is unknown.
    """

    type: Literal["jsonl", "json", "text"]
    final: list[Match] = Field(default_factory=list)  # the last value is the final message
    tool_calls: list[Match] = Field(default_factory=list)  # each value is the name of a tool that was called
    failure: list[Match] = Field(default_factory=list)  # the last value says why it failed, whatever its exit code
    forgets_on_failure: bool = False  # it then leaves out what it did before: its tool calls are unknown
    limit: list[Match] = Field(default_factory=list)  # the last value names the limit of its own that it ran into


class OwnLimits(_Data):
    """Limits the agent keeps by itself when told; the gateway's hold for every agent."""

    turns: Literal["hard", "soft"] | None = None  # soft = it goes on if the model does; None = no such setting
    output: bool = False  # the cap of one reply
    time: bool = False


class Variant(_Data):
    """What is laid over the adapter when its agent is led to the gateway by interception: no base URL anywhere.

    Mappings merge, everything else replaces; a value of null takes a key away.
    """

    argv: list[str] | None = None
    env: dict[str, str | None] = Field(default_factory=dict)
    env_json: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, Any] = Field(default_factory=dict)
    host: str  # the provider's host that it then calls


class HarborAgent(_Data):
    """An agent that Harbor installs and drives, in our sandbox and at our gateway. See `harbor_agent`.

    Example: HarborAgent(agent="terminus-2", options={"parser_name": "xml"}).
    """

    agent: str = Field(min_length=1)  # Harbor's name of it, or module:Class found by PYTHONPATH
    # Harbor's own options of that agent (`--agent-kwarg`), as `harbor agent schema` lists them; may hold placeholders.
    options: dict[str, Any] = Field(default_factory=dict)
    provider: str | None = None  # whose model it is told to ask for; None = the agent's own provider, else openai
    api_format: str | None = None  # Harbor's `--api-format`; None = what the agent speaks to that provider
    skip_install: bool | None = None  # None = where Harbor finds the agent in the sandbox already
    # Where model calls come from: the agent's programs, or Harbor on this machine; None = as Harbor's class says.
    calls_from: Literal["sandbox", "host"] | None = None


class Harness(_Data):
    """One agent. Shipped ones are the YAML files beside this module; a user's own file has the same fields."""

    name: str
    dialect: Literal["openai_chat", "openai_responses", "anthropic", "gemini"]
    install: NpmInstall | PipInstall | None = Field(None, discriminator="type")  # None = nothing to install
    argv: list[str] = Field(default_factory=list)  # [] = Harbor drives it
    harbor: HarborAgent | None = None  # None = `argv` is all there is to it
    stdin: str | None = None  # None = /dev/null
    env: dict[str, str] = Field(default_factory=dict)
    # Environment values that are JSON documents, written as YAML here and serialised when rendered.
    env_json: dict[str, Any] = Field(default_factory=dict)
    # Path inside the sandbox -> text, or data that is written as JSON (which is YAML too). `${home}` and `${app}` lead
    # to the two folders.
    files: dict[str, Any] = Field(default_factory=dict)
    output: Output
    own_limits: OwnLimits = OwnLimits()
    closed_status: int = 403  # what a spent session answers so that this agent ends at once
    exit_0_is_success: bool = True  # False = it exits 0 after failures too; `output.failure` tells then
    limit_exit_codes: dict[int, str] = Field(default_factory=dict)  # of its own limits: exit code -> which
    intercept: Variant | None = None  # None = it cannot be run without a base URL
    needs_intercept: bool = False  # it takes no base URL
    # Host names the agent calls beside the gateway even when told not to (for people and for network rules).
    outbound_hosts: list[str] = Field(default_factory=list)
    told_off: list[str] = Field(default_factory=list)  # what it was told to leave alone: titles, updates, ...
    changing: list[str] = Field(default_factory=list)  # what of its prompt changes per request or per run, for people
    needs: str = ""  # one line for people: what this machine must have
    # Why one conversation of it is more than one row, for people; "" = each turn holds all that came before it.
    splits_rows: str = ""
    notes: str = ""  # one line for people: quirks that a reader of its traces should know

    @model_validator(mode="before")
    @classmethod
    def _by_harbor(cls, data: Any) -> Any:
        """What Harbor drives has no output of its own to read, and needs no more than its name.

        Most of Harbor's agents call through LiteLLM, which asks again for minutes after a 403, and not after a 401.
        """
        if isinstance(data, dict) and data.get("harbor") is not None:
            return {"dialect": "openai_chat", "output": {"type": "text"}, "closed_status": 401, **data}
        return data

    @model_validator(mode="after")
    def _run_one_way(self) -> Self:
        if bool(self.argv) == (self.harbor is not None):
            raise ValueError("give argv (a command) or harbor (an agent that Harbor drives), one of the two")
        if self.harbor is not None and (self.stdin is not None or self.intercept is not None or self.needs_intercept):
            raise ValueError("what Harbor drives has no stdin, and is led to the gateway by a base URL only")
        return self


_PLACEHOLDER = re.compile(r"\$?\$\{(\w+)\}")  # with two $ it is no placeholder, but the text with one


def render(value: Any, values: Mapping[str, str | int]) -> Any:
    """Fill the placeholders in a string, list or mapping; a string that *is* a placeholder keeps the value's type.

    Raises ConfigError naming a placeholder that does not exist.
    """
    if isinstance(value, str):
        whole = _PLACEHOLDER.fullmatch(value)
        if whole:
            return _filled(whole, values)
        return _PLACEHOLDER.sub(lambda match: str(_filled(match, values)), value)
    if isinstance(value, Mapping):
        return {str(render(key, values)): render(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [render(item, values) for item in value]
    return value


def literal(text: str) -> str:
    """The text as `render` gives it back unchanged."""
    return re.sub(r"(?=\$\{\w+\})", "$", text)


def _filled(match: re.Match[str], values: Mapping[str, str | int]) -> str | int:
    name = match[1]
    if match[0].startswith("$$"):
        return match[0][1:]
    if name not in values:
        raise ConfigError(
            f"unknown placeholder ${{{name}}}; known are {', '.join(values)}; for the text itself, which a shell is to "
            f"fill in, write $${{{name}}}"
        )
    return values[name]


def render_env(harness: Harness, values: Mapping[str, str | int]) -> dict[str, str]:
    """The agent's environment: plain values as strings, JSON documents in compact form."""
    env = {key: str(render(value, values)) for key, value in harness.env.items()}
    for key, document in harness.env_json.items():
        env[key] = json.dumps(render(document, values), separators=(",", ":"))
    return env


def render_files(harness: Harness, values: Mapping[str, str | int]) -> dict[str, str]:
    """Files to write before the agent starts: path inside the sandbox -> text."""
    files = {}
    for path, content in harness.files.items():
        filled = render(content, values)
        files[path] = filled if isinstance(filled, str) else _as_json(filled)
    return files


# What YAML takes in text only as an escape of its own, which JSON's is too.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def _as_json(data: Any) -> str:
    """JSON that YAML readers take as well: they make two lone halves of JSON's escape of a character above U+FFFF."""
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(data, indent=1, ensure_ascii=False))
