"""How the turns of one session hang together, told by token ids and request facts alone.

Owns parents, forks, lineages and the decision which turns are the agent's work. It changes nothing but a turn's role,
and nothing here does I/O. Called by `trace`, by `session` (which calls count as work) and by the learner.

**Parent.** The parent of a turn is the turn whose prompt + completion is the longest prefix of its prompt. All prompts
go into one tree of shared beginnings (`prefix_tree`), so a session costs time linear in its tokens.

**Side calls.** Titles, probes and summaries reach the same endpoint as the agent's work. Roles are decided over the
whole session, never at arrival, so a side call that comes first or runs in parallel is told as well. Sub-agents, with
tools and a system prompt of their own, are the agent's work. The rules, in order:

1. A call with `max_tokens` 1 is a probe.
2. If any call of the session offered tools, a call that offered none (or forbade them, `tool_choice` "none") is a side
   call (title, topic, summary, router), unless it extends a tool-offering turn by token prefix or is extended by one.
   One that extends a turn is a side call still if the agent went on beside it: the turn has a continuation with
   tools, or a later history holds the reply as text of somebody else (a compaction) or has nothing of it.
3. Where no call offered tools, a call with one question under a system prompt of its own, beside a conversation with
   replies in its history, is a side call (a commit message, a name), and so is one that wants a JSON schema where the
   others do not. Every other call is the agent's.
4. Among the calls that remain, the model name asked for most often is the agent's; a call under another name is a side
   call unless it is connected by prefix to a call under that name, or is of a sub-agent that used tools.
5. A repeated request is a retry: equal prompt ids, equal messages, or, in the middle of a conversation, equal messages
   but for the last one. The attempts that a later turn extends, or whose whole reply a later history holds, are kept;
   if there is none, the last that finished. The others are abandoned, and so is a reply that later histories hold a
   part of only.

A side call's own place in the graph is kept; the parents and forks of the agent's turns are told among these alone.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture_proxy.ids import TokenIds, packed
from capture_proxy.prefix_tree import PrefixTree, Stretch
from capture_proxy.retries import Conversations, same_reply, text_of
from capture_proxy.types import IN_PROCESS, Turn, TurnRole, TurnStatus


@dataclass(frozen=True, slots=True)
class Facts:
    """What the side-call rule reads of a request; known before the engine is asked."""

    offers_tools: bool
    model: str
    max_tokens: int | None  # as the agent asked, tokens

    @classmethod
    def of(cls, turn: Turn) -> Facts:
        model = turn.request.get("model")
        return cls.asked(
            turn.request.get("tools"),
            turn.request.get("tool_choice"),
            model if isinstance(model, str) else "",
            turn.requested_sampling.get("max_tokens"),
        )

    @classmethod
    def asked(cls, tools: Any, tool_choice: Any, model: str, max_tokens: int | None) -> Facts:
        """Tools that may not be called are not offered: some agents ask for a summary that way."""
        return cls(bool(tools) and tool_choice != "none", model, max_tokens)


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a prompt leaves what an earlier turn has: token `position` of the prompt is the first that differs.

    Example: Fork(2051, "r1-0003", "reply rewritten") when the agent dropped the reasoning of turn 3.
    """

    position: int
    turn_id: str  # the turn whose tokens are shared up to `position`
    reason: str  # "history rewritten", "reply rewritten" or "another continuation"


@dataclass(frozen=True, slots=True)
class Node:
    """Where a turn stands. `parent` None = a root; `fork` None = it only extends, or shares no token with any turn."""

    turn_id: str
    parent: str | None
    fork: Fork | None = None


@dataclass(slots=True)
class Graph:
    """The turns of a session as a forest, in order of arrival."""

    nodes: dict[str, Node] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # equal for turns with equal prompt ids; absent = unknown

    @property
    def roots(self) -> list[str]:
        return [node.turn_id for node in self.nodes.values() if node.parent is None]

    @property
    def lineages(self) -> list[list[str]]:
        """Each path from a root to a leaf, as turn ids; every turn is on at least one."""
        return [self.ancestry(turn_id) for turn_id in self.nodes if not self.children.get(turn_id)]

    def ancestry(self, turn_id: str) -> list[str]:
        """From the root down to the turn itself."""
        path = [turn_id]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


def build(turns: Sequence[Turn]) -> Graph:
    """The graph of a session's turns, whatever order they are given in.

    A turn whose ids are unknown, or are no token ids, stands alone.
    """
    ordered = sorted(turns, key=lambda t: (t.index, t.turn_id))
    by_id = {turn.turn_id: turn for turn in ordered}
    tree, ends, forks = PrefixTree(), dict[str, Stretch](), dict[str, Fork]()
    for turn in by_id.values():
        ids = _token_ids(turn)
        if ids is None:
            continue
        ends[turn.turn_id], position, left = tree.add(turn.turn_id, *ids)
        if left is not None:
            forks[turn.turn_id] = Fork(position, left, "")
    nearest = tree.nearest_wholes()
    graph = Graph(prompts={turn_id: id(end) for turn_id, end in ends.items()})
    for turn_id in by_id:
        candidates = [by_id[t] for t in nearest[id(ends[turn_id])]] if turn_id in ends else []
        # Of equal sequences (retries that sampled alike) the last one that finished is what the agent continued.
        parent = max(candidates, key=lambda c: (c.status is TurnStatus.OK, c.index), default=None)
        fork = forks.get(turn_id)
        fork = fork and Fork(fork.position, fork.turn_id, _reason(fork.position, by_id[fork.turn_id], parent))
        graph.nodes[turn_id] = Node(turn_id, parent.turn_id if parent else None, fork)
        if parent is not None:
            graph.children.setdefault(parent.turn_id, []).append(turn_id)
    return graph


def assign_roles(turns: Sequence[Turn]) -> Graph:
    """Set `role` and `side_reason` of every turn by the rules above; returns the graph they were read from."""
    graph = build(turns)
    if all(turn.dialect == IN_PROCESS for turn in turns):  # nobody else's program made these: there is nothing to guess
        for turn in turns:
            turn.role, turn.side_reason = TurnRole.AGENT, None
        return graph
    reasons = _request_reasons(turns, graph)
    for turn_id, reason in _abandoned(turns, graph).items():
        reasons.setdefault(turn_id, reason)
    for turn in turns:
        turn.side_reason = reasons.get(turn.turn_id)
        turn.role = TurnRole.SIDE if turn.side_reason else TurnRole.AGENT
    if not reasons:
        return graph
    own = build([turn for turn in turns if turn.role is TurnRole.AGENT])
    merged = Graph({tid: own.nodes.get(tid, node) for tid, node in graph.nodes.items()}, {}, graph.prompts)
    for node in merged.nodes.values():
        if node.parent is not None:
            merged.children.setdefault(node.parent, []).append(node.turn_id)
    return merged


def count_agent_calls(facts: Iterable[Facts]) -> int:
    """How many of these calls count as the agent's work, by request facts alone (rules 1 and 2)."""
    known = list(facts)
    any_tools = any(f.offers_tools for f in known)
    return sum((f.offers_tools or not any_tools) and f.max_tokens != 1 for f in known)


def _token_ids(turn: Turn) -> tuple[TokenIds, array[int]] | None:
    if not turn.prompt_ids_P:
        return None
    try:
        return TokenIds.of(turn.prompt_ids_P), packed(turn.completion_ids_T)
    except ValueError:
        return None


def _reason(position: int, other: Turn, parent: Turn | None) -> str:
    if len(other.prompt_ids_P) <= position < len(other.prompt_ids_P) + len(other.completion_ids_T):
        return "reply rewritten"
    return "history rewritten" if parent is None else "another continuation"


# --- which calls are the agent's work


def _request_reasons(turns: Sequence[Turn], graph: Graph) -> dict[str, str]:
    """Why a turn is no work of the agent, by rules 1 to 4."""
    facts = {turn.turn_id: Facts.of(turn) for turn in turns}
    reasons = {tid: "probe: asks for one token" for tid, f in facts.items() if f.max_tokens == 1}
    with_tools = {tid for tid, f in facts.items() if f.offers_tools}
    if with_tools:
        connected = _connected(with_tools, graph) - _beside(turns, facts, graph)
        for tid in facts.keys() - connected - with_tools:
            reasons.setdefault(tid, "offers no tools, unlike the agent's calls of this session")
    else:
        for tid, reason in _beside_without_tools([t for t in turns if t.turn_id not in reasons], graph).items():
            reasons.setdefault(tid, reason)
    for tid, reason in _other_models([t for t in turns if t.turn_id not in reasons], facts, graph).items():
        reasons.setdefault(tid, reason)
    return reasons


def _beside(turns: Sequence[Turn], facts: dict[str, Facts], graph: Graph) -> set[str]:
    """Calls without tools that extend one with tools although the agent itself went on without them (rule 2)."""
    by_id = {turn.turn_id: turn for turn in turns}
    found: set[str] = set()
    for node in graph.nodes.values():
        if node.parent is None or facts[node.turn_id].offers_tools or not facts[node.parent].offers_tools:
            continue
        below = _below([node.turn_id], graph)
        if not any(facts[tid].offers_tools for tid in below):
            turn, parent = by_id[node.turn_id], by_id[node.parent]
            siblings = _below([node.parent], graph) - below - {node.parent}
            others = [t for t in turns if facts[t.turn_id].offers_tools and t.turn_id != node.parent]
            beside = [t for t in others if t.turn_id in siblings]
            later = [t for t in others if t.index > turn.index and _went_on(t, parent, turn)]
            if (beside or later) and not any(_replies_with(t, turn) for t in [*beside, *others]):
                found |= below
    return found


def _went_on(later: Turn, parent: Turn, turn: Turn) -> bool:
    """Whether a later request is of the agent of `parent`, with the turn's reply as a summary or without it."""
    reply = text_of(turn.message)
    messages = [m for m in later.request.get("messages") or [] if isinstance(m, dict)]
    if reply and any(reply in text_of(m) for m in messages if m.get("role") not in ("assistant", "tool")):
        return True
    return _has_replies(later) and _agent_of(later) == _agent_of(parent)


def _replies_with(later: Turn, turn: Turn) -> bool:
    """Whether a later request has the turn's reply in its history, as a reply."""
    reply = text_of(turn.message)
    messages = later.request.get("messages") or []
    return bool(reply) and any(
        isinstance(m, dict) and m.get("role") == "assistant" and text_of(m) == reply for m in messages
    )


def _agent_of(turn: Turn) -> tuple[Any, Any]:
    """What one agent keeps over its calls, and another has otherwise: the system messages and the tools."""
    return _system_of(turn), turn.request.get("tools")


def _system_of(turn: Turn) -> str:
    """The system messages at the beginning; later ones are reminders."""
    messages = [m for m in turn.request.get("messages") or [] if isinstance(m, dict)]
    leading = itertools.takewhile(lambda m: m.get("role") in ("system", "developer"), messages)
    return "\0".join(text_of(m) for m in leading)


def _opening_of(turn: Turn) -> str:
    """The first message that is no system message."""
    messages = [m for m in turn.request.get("messages") or [] if isinstance(m, dict)]
    return next((text_of(m) for m in messages if m.get("role") not in ("system", "developer")), "")


def _has_replies(turn: Turn) -> bool:
    return any(isinstance(m, dict) and m.get("role") == "assistant" for m in turn.request.get("messages") or [])


def _beside_without_tools(turns: Sequence[Turn], graph: Graph) -> dict[str, str]:
    """Rule 3: what stands beside the agent's conversation in a session without tools."""
    reasons: dict[str, str] = {}
    plain = {t.turn_id for t in turns if not t.requested_sampling.get("response_format")}
    if plain and len(plain) < len(turns):
        connected = _connected(plain, graph)
        reasons |= {
            t.turn_id: "asks for a JSON schema, unlike the agent's calls of this session"
            for t in turns
            if t.turn_id not in connected
        }
    by_system: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.turn_id not in reasons:
            by_system[_system_of(turn)].append(turn)
    talking = {system for system, same in by_system.items() if any(_has_replies(t) for t in same)}
    if talking:
        talk = [t for system in talking for t in by_system[system]]
        connected = _connected({t.turn_id for t in talk}, graph)
        # A system prompt with a clock in it is another one each time, but the talk begins with the same question.
        openings = {_opening_of(t) for t in talk}
        for turn in turns:
            if turn.turn_id not in connected and _opening_of(turn) not in openings:
                reasons.setdefault(
                    turn.turn_id, "one question under a system prompt of its own, beside the agent's talk"
                )
    return reasons


def _other_models(turns: Sequence[Turn], facts: dict[str, Facts], graph: Graph) -> dict[str, str]:
    """Rule 4: calls under another model name than the agent's."""
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()  # breaks a tie: the agent's prompts are the long ones
    for turn in turns:
        calls[facts[turn.turn_id].model] += 1
        tokens[facts[turn.turn_id].model] += len(turn.prompt_ids_P)
    if len(calls) < 2:
        return {}
    agent = max(calls, key=lambda name: (calls[name], tokens[name], name))
    own = {t.turn_id for t in turns if facts[t.turn_id].model == agent or (facts[t.turn_id].offers_tools and _used(t))}
    same = _connected(own, graph)
    return {
        t.turn_id: f"asks for model {facts[t.turn_id].model!r}, the agent for {agent!r}"
        for t in turns
        if t.turn_id not in same
    }


def _used(turn: Turn) -> bool:
    """Whether the history holds the result of a tool."""
    return any(isinstance(m, dict) and m.get("role") == "tool" for m in turn.request.get("messages") or [])


def _connected(seeds: set[str], graph: Graph) -> set[str]:
    """The seeds, everything they extend, and everything that extends them."""
    found = set(seeds)
    for seed in seeds:
        parent = graph.nodes[seed].parent
        while parent is not None and parent not in found:
            found.add(parent)
            parent = graph.nodes[parent].parent
    return found | _below(seeds, graph)


def _below(turn_ids: Iterable[str], graph: Graph) -> set[str]:
    """These turns and everything that extends them."""
    found = set(turn_ids)
    pending = list(found)
    while pending:
        for child in graph.children.get(pending.pop(), []):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def _abandoned(turns: Sequence[Turn], graph: Graph) -> dict[str, str]:
    """Rule 5. A request that was asked once more while the first still ran is a sibling, unless it is the same one."""
    ordered = sorted(turns, key=lambda t: t.index)
    talks = Conversations(ordered)
    done = [t for t in turns if t.status is TurnStatus.OK]
    lives = {t.turn_id for t in done if graph.children.get(t.turn_id) or talks.received(t)}
    reasons = {
        t.turn_id: "abandoned: the agent received a part of this reply only"
        for t in done
        if t.turn_id not in lives and talks.cut(t)
    }
    for groups, only_earlier in ((_repeats(ordered, talks, graph), False), (_rephrased(ordered, talks), True)):
        for same in groups.values():
            finished = [t for t in same if t.status is TurnStatus.OK and t.turn_id not in reasons]
            finished = [t for t in finished if t.completion_ids_T] or finished  # a reply of no tokens is no answer
            if len(same) < 2 or not finished:
                continue
            kept = _told_apart([t for t in finished if t.turn_id in lives], graph) or finished[-1:]
            kept_ids = {t.turn_id for t in kept}
            for turn in same:
                # A rephrased request that came after every kept one may still be in use.
                superseded = not only_earlier or (turn.index < kept[-1].index and not _overlap(turn, kept[-1]))
                if turn.turn_id not in kept_ids and superseded:
                    reasons.setdefault(turn.turn_id, f"abandoned: asked again as {kept[-1].turn_id}")
    return reasons


def _told_apart(attempts: list[Turn], graph: Graph) -> list[Turn]:
    """Of attempts that sampled the same reply, which a history holds once, the last; all that were extended by ids."""
    return [
        turn
        for place, turn in enumerate(attempts)
        if graph.children.get(turn.turn_id)
        or not any(same_reply(turn.message, later.message) for later in attempts[place + 1 :])
    ]


def _repeats(ordered: Sequence[Turn], talks: Conversations, graph: Graph) -> dict[Any, list[Turn]]:
    """Turns that asked the same: by prompt ids, and where those are unknown (a failed call) by messages."""
    prompts: dict[Any, set[int]] = defaultdict(set)
    for turn in ordered:
        if turn.turn_id in graph.prompts:
            prompts[talks.same_request(turn)].add(graph.prompts[turn.turn_id])
    groups: dict[Any, list[Turn]] = defaultdict(list)
    for turn in ordered:
        request = talks.same_request(turn)
        prompt = graph.prompts.get(turn.turn_id)
        if prompt is None and len(prompts[request]) == 1:
            (prompt,) = prompts[request]
        if prompt is not None or turn.request.get("messages"):
            groups[request if prompt is None else prompt].append(turn)
    return groups


def _rephrased(ordered: Sequence[Turn], talks: Conversations) -> dict[Any, list[Turn]]:
    """Turns that asked the same but for their last message, in the middle of a conversation."""
    groups: dict[Any, list[Turn]] = defaultdict(list)
    for turn in ordered:
        key = talks.same_history(turn)
        if key is not None and turn.prompt_ids_P and turn.completion_ids_T:
            groups[key].append(turn)
    return groups


def _overlap(first: Turn, second: Turn) -> bool:
    """Whether both ran at once: parallel siblings, not a retry."""
    return second.started_at < first.finished_at
