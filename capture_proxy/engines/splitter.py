"""Which part of a reply's text may be shown to the agent while it is still being sampled.

Owns holding back: whatever could turn out to be a tool call, a reasoning marker, or white space that the engine's
parsers strip. It decides nothing about the final message, which is the engine's own parse of the whole reply; it only
keeps what is streamed a prefix of it. Used by `engines.vllm`, and by `rendering` where a model family's own reader
reads the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture_proxy.engines.base import TextSplitter

THINK, END_THINK = "<think>", "</think>"
# How tool calls of the model families that vLLM parses begin. A marker too many costs latency, one too few shows
# markup to the agent.
TOOL_MARKERS = (
    "<tool_call",
    "<|tool_call",
    "<function=",
    "<function_call",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<｜tool",
    "<|channel|>",
    "<|action_start|>",
    "<minimax:tool_call>",
    "<｜DSML｜",
)


class Splitter:
    """Feed it text as it is sampled; it returns what may go out, in order.

    Example: with tools, feed("I look. <tool") gives ("I look.", ""), and nothing comes out after "<tool_call".
    """

    def __init__(
        self,
        *,
        tools: bool,
        reasoning: bool,
        reasoning_ended: bool = False,
        markers: Sequence[str] = TOOL_MARKERS,
        trimmed: bool = False,
        opened: bool = False,
    ) -> None:
        """`reasoning`: a reasoning parser reads the reply; `reasoning_ended`: the prompt has closed the reasoning.

        `trimmed`: the reader of the whole reply trims both parts and takes text for reasoning only if the reply begins
        with the marker, or if the prompt does so already (`opened`).
        """
        self._markers = tuple(markers) if tools else ()
        self._whole_may_be_call = tools  # some formats are bare JSON or a bare list
        self._tools = tools
        self._trimmed = trimmed
        self._state = "unsure" if reasoning and not reasoning_ended else "content"
        if opened:
            self._state = "reasoning"
        self._strip_start = reasoning
        self._content_started = self._reasoning_started = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(content, reasoning) that is settled by this text."""
        self._held += text
        reasoning = self._feed_reasoning() if self._state in ("unsure", "reasoning") else ""
        content = self._feed_content() if self._state == "content" else ""
        return content, reasoning

    def _feed_reasoning(self) -> str:
        if self._state == "unsure":
            start = self._held.lstrip()
            if start.startswith(THINK):
                self._held, self._state = start[len(THINK) :], "reasoning"
            elif self._trimmed and not THINK.startswith(start):
                self._state = "content"
                return ""
            elif END_THINK in self._held and not self._trimmed:  # the prompt had opened the reasoning already
                self._state = "reasoning"
            else:
                return ""  # text before any marker may be either: only the whole reply tells
        if self._trimmed and not self._reasoning_started:
            self._held = self._held.lstrip()
            self._reasoning_started = bool(self._held)
        before, found, after = self._held.partition(END_THINK)
        if found:
            self._held, self._state = after, "content"
            return before.rstrip()
        if self._tools and any(marker in before for marker in self._markers):
            self._state = "closed"  # a call from inside the reasoning: parsers disagree on what is what
            return ""
        ready = len(before) - _overlap(before, (END_THINK, *self._markers))
        ready = len(before[:ready].rstrip())
        self._held = before[ready:]
        return before[:ready]

    def _feed_content(self) -> str:
        text = self._held
        if not self._content_started:
            if self._strip_start:
                text = self._held = text.lstrip()  # the engine's message is stripped there as well
            first = text.lstrip()[:1]
            if not first:
                return ""
            if self._whole_may_be_call and first in "{[":
                self._state = "closed"
                return ""
            self._content_started = True
        starts = [at for marker in self._markers if (at := text.find(marker)) >= 0]
        if starts:
            self._state = "closed"
            text = text[: min(starts)]
            ready = len(text.rstrip())
        elif self._tools or self._trimmed:
            ready = len(text) - _overlap(text, self._markers)
            ready = len(text[:ready].rstrip())
        else:
            ready = len(text)
        self._held = self._held[ready:]
        return text[:ready]


class HarmonySplitter:
    """The same for harmony's channels: analysis is reasoning, final and commentary to nobody are content.

    Example: feed("<|channel|>final<|message|>hi <|end|>") gives ("hi", "").
    """

    _ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
    _BODY = "<|message|>"

    def __init__(self) -> None:
        self._held = ""
        self._target: str | None = None  # where the open body's text goes; "" = nowhere, None = in a header
        # White space at the end of a part: it goes out once more text of that part follows, and never if none does.
        self._space = {"content": "", "reasoning": ""}
        self._started = {"content": False, "reasoning": False}

    def feed(self, text: str) -> tuple[str, str]:
        """(content, reasoning) that is settled by this text."""
        self._held += text
        out = {"content": "", "reasoning": ""}
        while self._held:
            if self._target is None:
                header, found, rest = self._held.partition(self._BODY)
                if not found:
                    break
                self._target, self._held = self._channel(header), rest
                continue
            ends = [at for mark in self._ENDS if (at := self._held.find(mark)) >= 0]
            ready = min(ends) if ends else len(self._held) - _overlap(self._held, self._ENDS)
            if self._target:
                out[self._target] += self._settled(self._target, self._held[:ready])
            self._held = self._held[ready:]
            if not ends:
                break
            self._target = None
        return out["content"], out["reasoning"]

    def _settled(self, target: str, body: str) -> str:
        body = self._space[target] + body
        body = body if self._started[target] else body.lstrip()
        kept = len(body.rstrip())
        self._space[target] = body[kept:]
        self._started[target] |= kept > 0
        return body[:kept]

    @staticmethod
    def _channel(header: str) -> str:
        header = header.rpartition("<|start|>")[2]
        if " to=" in header or header.startswith("to="):
            return ""
        channel = header.partition("<|channel|>")[2].split()
        return {"analysis": "reasoning", "final": "content", "commentary": "content"}.get(
            channel[0] if channel else "", ""
        )


def splitter_for(family: str, *, opened: bool) -> TextSplitter:
    """What may be streamed of a reply that this family's renderer reads; `opened`: the prompt opens the reasoning."""
    if family == "gpt-oss":
        return HarmonySplitter()
    # The renderers find calls also where no tools were offered; what they found is then shown as text, at the end.
    return Splitter(tools=True, reasoning=True, trimmed=True, opened=opened)


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of the markers begins with."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
