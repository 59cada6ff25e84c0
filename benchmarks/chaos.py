"""`python -m benchmarks.chaos`: a training run of 40 steps in which each part is killed once and much else goes wrong.

Owns the table; the run itself is `tests.proof.chaos`. Exits with 1 when the run did not finish, its record does not
account for every rollout, or something of it is left on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from harness_trainer.cli.audit import print_audit
from tests.proof.chaos import Chaos, Report, chaos


def main() -> int:
    default = Chaos()
    parser = argparse.ArgumentParser(
        prog="benchmarks.chaos", description="A training run that is killed and spoilt, and an audit of its record."
    )
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--faults", type=float, default=default.engine_fault_rate, help="share of sampling calls")
    parser.add_argument("--infra", type=float, default=default.infra_rate, help="share of agents that spoil themselves")
    parser.add_argument("--hangs", type=float, default=default.hang_rate, help="share of verifiers that hang")
    parser.add_argument(
        "--isolation",
        choices=("none", "bubblewrap"),
        default=default.isolation,
        help="of the local sandbox; agents cannot remove a sealed one, so fewer of them spoil their rollout",
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--out", type=Path, help="folder to keep, empty; a temporary one if left out")
    args = parser.parse_args()
    config = Chaos(
        num_steps=args.steps,
        engine_fault_rate=args.faults,
        infra_rate=args.infra,
        hang_rate=args.hangs,
        isolation=args.isolation,
        seed=args.seed,
    )
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        report = chaos(config, args.out, tell)
    else:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            report = chaos(config, Path(folder), tell)
    _print(config, report)
    return 1 if report.problems else 0


def _print(config: Chaos, report: Report) -> None:
    if report.audit is not None:
        print_audit(report.audit)
    rows = [
        ("steps", config.num_steps),
        ("seconds, audit not counted", f"{report.seconds:.0f}"),
        ("killed with signal 9", "; ".join(report.kills)),
        ("times that the command was given", report.commands),
        *((f"sampling calls that the engine spoilt: {kind}", count) for kind, count in report.engine_faults.items()),
        ("problems", len(report.problems)),
    ]
    print()
    for name, value in rows:
        print(f"{name:<48} {value}")
    for ending in report.endings:
        print(f"the command ended: {ending}")
    for problem in report.problems[:50]:
        print(f"PROBLEM {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
