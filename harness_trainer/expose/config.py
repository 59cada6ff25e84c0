"""Settings of the ways from the public internet to the gateway. Nothing here starts anything."""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoExpose(_Settings):
    """Nothing is opened; `gateway.public_url`, if given, is taken as it is and not looked at."""

    type: Literal["none"] = "none"


class DirectExpose(_Settings):
    """This machine can be reached: `gateway.public_url` says where."""

    type: Literal["direct"] = "direct"
    listen: str | None = Field(
        None, description="HOST:PORT to listen on, e.g. 0.0.0.0:8000; null = something else leads to the gateway's port"
    )

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{value!r} is not HOST:PORT, e.g. 0.0.0.0:8000")
        return value


class CloudflaredExpose(_Settings):
    """A quick tunnel of Cloudflare's, without an account; its address is another one each time it is opened."""

    type: Literal["cloudflared"] = "cloudflared"
    binary: str = Field("cloudflared", description="the program, by name or path")


class GradioExpose(_Settings):
    """A share link of Gradio's (needs `pip install gradio`); it expires after some days, and is opened again."""

    type: Literal["gradio"] = "gradio"
    share_server: str | None = Field(None, description="HOST:PORT of a share server of your own; null = Gradio's")


class CommandExpose(_Settings):
    """Any program that opens a tunnel and goes on running."""

    type: Literal["command"] = "command"
    command: str = Field(
        "",
        validate_default=True,
        description="with {port} for the gateway's port or {gateway} for its HOST:PORT; prints its address, unless "
        "gateway.public_url names it: "
        "'ssh -R 80:localhost:{port} tunnel.example', 'cloudflared tunnel run mine'",
    )

    @field_validator("command")
    @classmethod
    def _words(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"is not a command: {error}") from error
        if not words:
            raise ValueError("is empty: give the program that opens the tunnel, with --gateway.expose.command")
        return value
