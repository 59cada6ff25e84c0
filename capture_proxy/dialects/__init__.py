"""The dialects agents speak. One object per dialect, registered here; `gateway` routes to them."""

from __future__ import annotations

from capture_proxy.dialects.anthropic import Anthropic
from capture_proxy.dialects.base import Dialect
from capture_proxy.dialects.gemini import Gemini
from capture_proxy.dialects.openai_chat import OpenAIChat
from capture_proxy.dialects.openai_responses import OpenAIResponses


def all_dialects() -> list[Dialect]:
    """Every dialect the gateway serves, in routing order."""
    return [Anthropic(), Gemini(), OpenAIChat(), OpenAIResponses()]
