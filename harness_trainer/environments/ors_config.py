"""Settings of ORS environments (`--tasks ors:...`). Owns names, defaults and what of them is nonsense; asks no server.

No secret is ever a setting: a setting says where a secret is (`env:NAME`, `file:PATH`), and only the process that opens
the environment reads it.
"""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness_trainer.environments.reward_settings import RewardTargets, RewardWeights

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_CATALOG = re.compile(r"[\w.-]+/[\w.-]+")
_SOURCE = re.compile(r"(env|file):.+", re.DOTALL)


class OrsConfig(BaseModel):
    """An environment that speaks the Open Reward Standard: of openreward.ai's catalog, or of a server of your own.

    Example: `OrsConfig(target="http://127.0.0.1:8080", split="train", indices="0-9", secrets={"K": "env:MY_KEY"})`; its
    tasks are the environment's own. `loops.ors` has the rules.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    type: Literal["ors"] = "ors"
    target: str = Field(
        "", validate_default=True, description="owner/name of the catalog, or the address of any ORS server"
    )
    name: str | None = Field(None, description="what metrics call it; null = the environment's name")
    env_name: str | None = Field(
        None, description="which environment of the server; null = its first one, which is its default"
    )
    split: str = Field("train", description="which of the environment's task lists")
    num_tasks: int | None = Field(None, ge=1, description="the first so many tasks of the split; null = all")
    indices: str | None = Field(None, description="tasks of the split by index, both ends included: 0-9,12; null = all")
    include_metadata: bool = Field(
        True, description="the fields of a task are columns of its row, which reward functions are given"
    )
    secrets: dict[str, str] = Field(
        default_factory=dict,
        description="what each session is given, by the name that the environment asks for: env:VARIABLE or file:PATH",
    )
    secret_domains: dict[str, list[str]] = Field(
        default_factory=dict,
        description="hosts that the platform lets a secret out to; those that OpenReward knows have theirs",
    )
    api_key_env: str | None = Field(
        None,
        description="variable with the OpenReward key; null = OPENREWARD_API_KEY for the catalog, none for an address",
    )
    token_env: str | None = Field(
        None, description="variable with the bearer token of a server that asks for one (a private Space); null = none"
    )
    rewards: RewardTargets = Field(
        default_factory=list,
        description="reward functions instead of the outcome reward, called with environments=[...] (their reward, "
        "rewards, metadata, finished, last_output): file.py:function or package.module:function",
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict, description="what each of them counts, by the function's name; else 1"
    )
    max_sessions: int | None = Field(None, ge=1, description="sessions open at once; null = as many as rollouts")
    ping_interval_s: float = Field(
        10.0, gt=0, le=100, description="a session is kept alive by a ping this often; OpenReward lets go after 120 s"
    )
    silence_s: float = Field(
        60.0, gt=0, description="a tool's stream that says nothing for so long is cut; servers send a sign every 10 s"
    )
    capacity_patience_s: float = Field(
        60.0, ge=0, description="how long an episode tries again for a place on a server that has none"
    )

    @property
    def is_url(self) -> bool:
        return "://" in self.target

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        if "://" not in value:
            if not _CATALOG.fullmatch(value):
                raise ValueError("write owner/name as openreward.ai's catalog has it, or an address with http://")
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the server's address must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("no login in the address: put the token into a variable and name it with token_env")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("ORS is served at the root of a host: leave the path out, and choose with env_name")
        return f"{parts.scheme}://{parts.netloc}"

    @field_validator("indices", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, int):
            return str(value)
        return ",".join(str(index) for index in value) if isinstance(value, list | tuple | range) else value

    @field_validator("indices")
    @classmethod
    def _indices(cls, value: str | None) -> str | None:
        if value is not None:
            parse_indices(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _secrets(cls, data: Any) -> Any:
        """Also `NAME=env:VARIABLE,...`. Checked here, where an error shows no value: it may be the secret itself."""
        secrets = data.get("secrets") if isinstance(data, dict) else None
        if isinstance(secrets, str):
            named = dict(word.strip().partition("=")[::2] for word in secrets.split(",") if word.strip())
            data = {**data, "secrets": named}
            secrets = named
        if secrets is not None and not isinstance(secrets, dict):
            raise ValueError("secrets: write NAME=env:VARIABLE or NAME=file:PATH, with commas between")
        for name, source in (secrets or {}).items():
            if not isinstance(source, str) or not _SOURCE.fullmatch(source):
                where = "say where it is, env:VARIABLE or file:PATH; never write it down here"
                raise ValueError(f"the secret {name if source else 'that was given'}: {where}")
        return data

    @model_validator(mode="after")
    def _one_choice(self) -> OrsConfig:
        if self.num_tasks is not None and self.indices is not None:
            raise ValueError("num_tasks and indices both choose tasks: give one of them")
        if unknown := [name for name in self.secret_domains if name not in self.secrets]:
            raise ValueError(f"secret_domains names {unknown[0]!r}, which is none of the secrets")
        return self


def parse_indices(value: str) -> list[int]:
    """`0-2,7` as [0, 1, 2, 7], in the order given and each once. Raises ValueError."""
    indices: dict[int, None] = {}
    for word in value.split(","):
        found = _RANGE.fullmatch(word.strip())
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise ValueError("write indices and ranges with commas between, such as 0-9,12")
        indices.update(dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1)))
    return list(indices)
