"""`python -m benchmarks.soak`: many agents, hang-ups, engine faults and one kill -9; then an audit of every turn.

Owns the table of the figures; the run itself is `tests.proof.soak`. Exits with 1 when a turn was lost, doubled or
mixed between sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.proof.soak import Report, Soak, soak


def main() -> int:
    default = Soak()
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description="A long, rough run and an audit of its store.")
    parser.add_argument("--sessions", type=int, default=default.num_sessions)
    parser.add_argument("--turns", type=int, default=default.num_turns, help="turns of each session")
    parser.add_argument("--parallel", type=int, default=default.num_parallel, help="sessions at the same time")
    parser.add_argument("--hang-ups", type=float, default=default.hang_up_rate, help="share of calls an agent leaves")
    parser.add_argument("--faults", type=float, default=default.engine_fault_rate, help="share of calls that fail")
    parser.add_argument("--seed", type=int, default=default.seed)
    args = parser.parse_args()
    config = Soak(
        num_sessions=args.sessions,
        num_turns=args.turns,
        num_parallel=args.parallel,
        hang_up_rate=args.hang_ups,
        engine_fault_rate=args.faults,
        seed=args.seed,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(_watched(config, Path(folder)))
    _print(config, report)
    return 1 if report.problems else 0


async def _watched(config: Soak, folder: Path) -> Report:
    report = Report()
    running = asyncio.create_task(soak(config, folder, report))
    while not running.done():
        await asyncio.wait([running], timeout=10)
        total = config.num_sessions * config.num_turns
        print(f"{report.acknowledged} of {total} turns, {report.restarts} restarts", file=sys.stderr, flush=True)
    return running.result()


def _print(config: Soak, report: Report) -> None:
    rows = [
        ("sessions x turns", f"{config.num_sessions} x {config.num_turns}"),
        ("seconds, audit not counted", f"{report.seconds:.1f}"),
        ("acknowledged turns", f"{report.acknowledged} ({report.acknowledged / report.seconds:.0f} a second)"),
        ("agents hung up", report.hang_ups),
        ("calls that failed for good and were made again", report.failures),
        ("gateway killed and restarted", report.restarts),
        *((f"turns recorded as {status}", count) for status, count in sorted(report.recorded.items())),
        ("finished, but no agent was told (not trained)", report.resampled),
        ("lost, doubled or mixed", len(report.problems)),
    ]
    for name, value in rows:
        print(f"{name:<48} {value}")
    for problem in report.problems[:20]:
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
