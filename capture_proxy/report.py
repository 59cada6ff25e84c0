"""What a person or a trainer should know about a rollout as a whole, graded as in OpenEnv's validator.

Owns the findings that no single turn shows: nothing to train on, a harness whose prompts share no beginning, replies
that led nowhere. Turn findings are `turn`'s and the engines'. Called by `trace`; pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from capture_proxy.graph import Graph
from capture_proxy.types import Finding, Severity, Turn, TurnRole, TurnStatus

# From here on rows per turn say something: two turns may well be two conversations.
_MIN_TURNS = 3
_MAX_ROWS_PER_TURN = 0.5
_MIN_STARVED = 3  # replies in a row that the window cut to a token


@dataclass(frozen=True, slots=True)
class Report:
    """Example: Report("tokens", 30, 1, 30, 1, [Finding(INFO, "side_calls", "1 side call: offers no tools ...")])."""

    capture_level: str  # "tokens", "text" = no turn has ids (evaluation only), "none" = no call was made
    num_turns: int  # of the agent
    num_side_turns: int
    num_trained_turns: int
    num_rows: int
    findings: list[Finding]

    @property
    def rows_per_turn(self) -> float | None:
        """1/n when all n trained turns extend each other, 1.0 when none does; None = nothing is trained."""
        return self.num_rows / self.num_trained_turns if self.num_trained_turns else None


def report(turns: Sequence[Turn], graph: Graph, rows: Sequence[Sequence[str]]) -> Report:
    """`graph` is that of `assign_roles`; `rows` are the lineages of the trained turns, as turn ids."""
    agent = [t for t in turns if t.role is TurnRole.AGENT]
    trained = {turn_id for row in rows for turn_id in row}
    level = "none"
    if turns:
        level = "tokens" if any(t.capture_level == "tokens" for t in turns) else "text"
    findings = [
        *_emptiness(agent, trained, level),
        *_structure(agent, graph, level),
        *_sharing(trained, rows, graph),
        *_waste(turns),
        *_ends(agent),
    ]
    return Report(level, len(agent), len(turns) - len(agent), len(trained), len(rows), findings)


def _emptiness(agent: list[Turn], trained: set[str], level: str) -> list[Finding]:
    if not agent:
        return [Finding(Severity.FATAL, "no_turns", "the agent made no model call of its own")]
    findings = []
    if not trained:
        codes = Counter(f.code for t in agent for f in t.findings if f.severity is Severity.FATAL)
        states = Counter(t.status.value for t in agent if t.status is not TurnStatus.OK)
        why = ", ".join(f"{name} {n}x" for name, n in (codes + states).most_common(4)) or "nothing was sampled"
        errors = [t.error for t in agent if t.error]
        last = f"; the last failed with: {errors[-1]}" if errors else ""
        findings.append(Finding(Severity.FATAL, "nothing_trainable", f"none of {len(agent)} turns: {why}{last}"))
    if level == "text" and any(t.status is not TurnStatus.FAILED for t in agent):
        findings.append(Finding(Severity.WARN, "text_only", "the engine gave no token ids: for evaluation only"))
    if len(agent) == 1:
        findings.append(Finding(Severity.WARN, "degenerate_rollout", "exactly one model call for the whole task"))
    return findings


def _structure(agent: list[Turn], graph: Graph, level: str) -> list[Finding]:
    known = {t.turn_id for t in agent if t.capture_level == "tokens"}
    if level != "tokens" or len(known) < 2:
        return []
    roots = [tid for tid in known if graph.nodes[tid].parent is None]
    forks = Counter(node.fork.reason for tid in known if (node := graph.nodes[tid]).fork is not None)
    findings = []
    if len(roots) == len(known):
        detail = f"every one of {len(known)} turns is its own root: the agent renders its prompt anew each time"
        findings.append(Finding(Severity.WARN, "per_turn_capture_only", detail))
    elif len(roots) > 1:
        detail = f"{len(roots)} roots across {len(known)} turns: sub-agents, or a history that was rewritten"
        findings.append(Finding(Severity.WARN, "multiple_roots", detail))
    if forks:
        detail = ", ".join(f"{reason} {n}x" for reason, n in forks.most_common())
        findings.append(Finding(Severity.INFO, "forks", detail))
    return findings


def _sharing(trained: set[str], rows: Sequence[Sequence[str]], graph: Graph) -> list[Finding]:
    """The alarm for a prompt that changes near its beginning: n turns become n rows that repeat their context."""
    if len(trained) < _MIN_TURNS or len(rows) <= _MAX_ROWS_PER_TURN * len(trained):
        return []
    forks = [node.fork for tid in trained if (node := graph.nodes[tid]).fork is not None]
    first = min((f for f in forks if f is not None), key=lambda f: f.position, default=None)
    where = f"; the earliest first differs from {first.turn_id} at token {first.position}" if first else ""
    detail = f"{len(rows)} rows for {len(trained)} turns{where}"
    return [Finding(Severity.WARN, "prefix_sharing_collapsed", detail)]


def _waste(turns: Sequence[Turn]) -> list[Finding]:
    findings = []
    side = Counter(t.side_reason for t in turns if t.side_reason and not t.side_reason.startswith("abandoned"))
    if side:
        detail = "; ".join(f"{n}x {reason}" for reason, n in side.most_common(4))
        findings.append(Finding(Severity.INFO, "side_calls", detail))
    abandoned = [t for t in turns if (t.side_reason or "").startswith("abandoned") and t.completion_ids_T]
    if abandoned:
        tokens = sum(len(t.completion_ids_T) for t in abandoned)
        detail = f"{len(abandoned)} sampled turns ({tokens} tokens) led nowhere: retries, or replies that were cut"
        findings.append(Finding(Severity.WARN, "discarded_turns", detail))
    return findings


def _ends(agent: list[Turn]) -> list[Finding]:
    """Replies that the cap or the window ended."""
    ordered = sorted(agent, key=lambda t: t.index)
    cut = [t for t in ordered if t.finish_reason == "length"]
    if not cut:
        return []
    detail = f"{len(cut)} of {len(ordered)} turns stopped at the cap on output: their end is the cap's, not the model's"
    findings = [Finding(Severity.WARN, "truncated_turns", detail)]
    longest = run = 0
    for turn in ordered:
        run = run + 1 if turn.finish_reason == "length" and len(turn.completion_ids_T) <= 1 else 0
        longest = max(longest, run)
    if longest >= _MIN_STARVED:
        detail = f"{longest} turns in a row had room for one token: the window was full"
        findings.append(Finding(Severity.WARN, "starved_replies", detail))
    return findings
