"""Settings of environments and own loops. Owns names, defaults and what of them is nonsense; asks no server."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class OpenEnvHarborConfig(BaseModel):
    """An `openenv harbor serve` server: its tasks, its agents, its sandboxes, its verifiers; the model is ours.

    Example: `OpenEnvHarborConfig(url="http://host:8200", harness="opencode", sandbox="docker", tasks="0-9")`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["openenv-harbor"] = "openenv-harbor"
    url: str = Field("", validate_default=True, description="address of the server")
    split: str | None = Field(None, description="which of the server's datasets; null = its only one")
    tasks: str | None = Field(None, description="tasks of the split by index, both ends included: 0-9,12; null = all")
    harness: str = Field("opencode", description="agent that the server runs, by the server's name for it")
    sandbox: str = Field("e2b", description="sandbox that the server runs it in, by Harbor's name: docker, e2b, ...")
    reward_key: str = Field("", description="the reward that trains, of tasks that have several")
    max_sessions: int = Field(
        4, ge=1, description="rollouts asked of the server at once; it is started with MAX_CONCURRENT_ENVS, usually 4"
    )
    token_env: str | None = Field(
        None, description="name of the variable that holds the server's bearer token (a private Space); null = none"
    )

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the server's address must begin with http:// or https:// and name a host")
        return value.rstrip("/")

    @field_validator("tasks")
    @classmethod
    def _tasks(cls, value: str | None) -> str | None:
        for word in [] if value is None else value.split(","):
            found = _RANGE.fullmatch(word.strip())
            if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
                raise ValueError("write indices and ranges with commas between, such as 0-9,12")
        return value

    def wants(self, index: int) -> bool:
        """Whether the task of this index is one of those asked for."""
        return self.tasks is None or any(
            int(found[1]) <= index <= int(found[2] or found[1]) for found in _RANGE.finditer(self.tasks)
        )


def _class_target(value: str) -> str:
    if not value.rpartition(":")[0]:
        raise ValueError("write file.py:Name or package.module:Name")
    return value


ClassTarget: TypeAlias = Annotated[str, AfterValidator(_class_target)]  # a person's own class, by name


class OwnLoopConfig(BaseModel):
    """A person's own loop: a class with `run(self, task, model)`; `loops.own_loop` says what it may do.

    Example: `OwnLoopConfig(target="my_loop.py:MyLoop")`; its tasks are the rows of `--tasks rows.jsonl`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["loop"] = "loop"
    target: ClassTarget = Field("", validate_default=True, description="the class: file.py:Name or package.module:Name")
    name: str | None = Field(None, description="what metrics call it; null = the class's name")
