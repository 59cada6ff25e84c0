"""What an agent says of itself: its final message, its tool calls, why it failed.

Owns the reading of standard output by the adapter's `Output`. An agent's word is not proof (a session's capture is);
what it does not say is unknown, never zero. Called by `rollouts.rollout`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.harnesses.base import Harness, Match


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Example: AgentReport("Done.", {"bash": 3}, None, None). None = the agent does not say."""

    final_message: str | None = None
    tool_calls: dict[str, int] | None = field(default=None)  # by tool name
    failure: str | None = None
    limit: str | None = None  # a limit of its own that it ran into


def read_report(harness: Harness, stdout: str, exit_code: int | None) -> AgentReport:
    """`exit_code` None = it was killed."""
    output = harness.output
    limit = None if exit_code is None else harness.limit_exit_codes.get(exit_code)
    if output.type == "text":
        return AgentReport(final_message=stdout.strip() or None, limit=limit)
    events = list(_lines(stdout) if output.type == "jsonl" else _document(stdout))
    names = _values(events, output.tool_calls)
    failure, own_limit, final = (_last(events, matches) for matches in (output.failure, output.limit, output.final))
    if output.type == "json" and not events and exit_code == 0 and not harness.exit_0_is_success:
        failure = "it printed no whole JSON document, which alone would tell how it ended"
    told = output.tool_calls and events and not (failure is not None and output.forgets_on_failure)
    return AgentReport(
        final_message=final if final not in (failure, own_limit) else None,  # then they are no words of the model's
        tool_calls=dict(Counter(map(str, names))) if told else None,
        failure=failure,
        limit=own_limit or limit,
    )


def _lines(stdout: str) -> Iterator[Any]:
    for line in stdout.split("\n"):  # not `splitlines`: what a model says may hold U+2028 and the like
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue  # agents mix plain log lines into their JSON output; models nest brackets without an end


_GOES_ON = re.compile(r"\s*[,\]}]")  # behind what is inside another document


def _document(stdout: str) -> Iterator[Any]:
    """The first whole JSON object or list that begins a line; none of one that was cut, nor what was inside it."""
    decoder, start = json.JSONDecoder(), 0
    for line in stdout.split("\n"):
        if line[:1] in ("{", "["):
            try:
                document, end = decoder.raw_decode(stdout, start)
            except (ValueError, RecursionError):
                document, end = None, start
            if document is not None and _GOES_ON.match(stdout, end) is None:
                yield document
                return
        start += len(line) + 1


def _last(events: list[Any], matches: list[Match]) -> str | None:
    for match in matches:
        found = [value for value in _values(events, [match]) if isinstance(value, str) and value.strip()]
        if found:
            return found[-1]
    return None


def _values(events: list[Any], matches: list[Match]) -> list[Any]:
    return [value for match in matches for value in (_joined if match.joined else _each)(events, match)]


def _each(events: list[Any], match: Match) -> Iterator[Any]:
    for event in events:
        for entry in _entries(event, match):
            for value in _at(entry, match.field):
                if value is not None and (not match.begins or _begins(value, match.begins)):
                    yield value


def _begins(value: Any, words: str) -> bool:
    return isinstance(value, str) and value.lstrip().startswith(words)


def _joined(events: list[Any], match: Match) -> Iterator[str]:
    pieces: list[str] = []
    for event in events:
        if found := [value for value in _each([event], match) if isinstance(value, str)]:
            pieces += found
        elif pieces:
            yield "".join(pieces)
            pieces = []
    if pieces:
        yield "".join(pieces)


def _entries(event: Any, match: Match) -> Iterator[Any]:
    """The objects of an event that have all of `where`: the event itself, or each item of a document that is a list."""
    for entry in event if isinstance(event, list) else [event]:
        if isinstance(entry, dict) and all(wanted in _at(entry, name) for name, wanted in match.where.items()):
            yield entry


def _at(value: Any, path: str) -> list[Any]:
    found = [value]
    for part in path.split("."):
        if part == "*":
            found = [item for each in found if isinstance(each, list) for item in each]
        else:
            found = [each[part] for each in found if isinstance(each, dict) and part in each]
    return found
