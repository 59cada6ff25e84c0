"""Does a run's own record hold together? An account of every attempt, slot, group, step and trained token.

Owns the order in which the rules are asked, and nothing of what they say: `attempts`, `groups`, `steps` and `tokens`
hold the rules, `observed` what is odd and breaks none, `records` reads the run folder, `account` counts. Reads the
folder alone: no process of the run is asked, so it also judges a run that is over, was killed, or goes on. Called by
the command line, the chaos test and the chaos benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness_trainer.audit import attempts, groups, observed, steps, tokens
from harness_trainer.audit.account import Audit, Violation, account
from harness_trainer.audit.records import Found, read_records

__all__ = ["RULES", "Audit", "Violation", "audit"]

_OF_RECORDS = (*attempts.RULES, *groups.RULES, *steps.RULES)
RULES = {rule.__name__: (rule.__doc__ or "").splitlines()[0] for rule in (*_OF_RECORDS, *tokens.RULES)}


def audit(run_dir: Path) -> Audit:
    """Every rule on everything. Raises RunDirError where the folder holds no run that can be read."""
    records = read_records(run_dir)
    result = account(records)
    for rule in _OF_RECORDS:
        result.violations += _named(rule.__name__, rule(records))
    for observe in observed.OBSERVATIONS:
        result.observations += [f"{what}: {detail}" for what, detail in observe(records)]
    for evidence in tokens.gather(records):
        result.num_turns += tokens.num_turns(evidence)
        result.num_trained_tokens += tokens.num_trained(evidence)
        for judge in tokens.RULES:
            result.violations += _named(judge.__name__, judge(evidence))
    return result


def _named(rule: str, found: Iterator[Found]) -> list[Violation]:
    return [Violation(rule, what, detail) for what, detail in found]
