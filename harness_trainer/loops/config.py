"""What bounds a white-box loop. Owns the configuration only; `tool_loop` and `rollouts.white_box` obey it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from harness_trainer.loops.base import LoopLimits


class LoopConfig(BaseModel):
    """Settings of the turns that we own (`--env`), beside those of every rollout (max_turns, max_tokens, timeout_s)."""

    model_config = ConfigDict(extra="forbid")

    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a whole episode after its first prompt, the model's and the tools' together (TRL's "
        "max_completion_length); null = the window and max_turns bound it",
    )
    max_tool_calling_iterations: int | None = Field(
        None, ge=1, description="rounds of tool calls in one episode; null = as many as max_turns allows"
    )
    tool_timeout_s: float | None = Field(
        None, gt=0, description="wall time of one tool call, after which the model is told so; null = the rollout's"
    )
    max_tool_chars: int = Field(100_000, ge=1, description="characters of one tool's reply that the model is shown")
    images: bool = Field(False, description="the model takes images; else each one in a tool's reply becomes a note")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='arguments of the chat template, e.g. {"enable_thinking": false}'
    )

    def limits(self, *, max_tokens: int, start_timeout_s: float) -> LoopLimits:
        return LoopLimits(
            max_completion_tokens=self.max_completion_tokens,
            max_tool_calling_iterations=self.max_tool_calling_iterations,
            max_tokens=max_tokens,
            max_tool_chars=self.max_tool_chars,
            tool_timeout_s=self.tool_timeout_s,
            start_timeout_s=start_timeout_s,
            images=self.images,
        )
