"""`harness-trainer launch hf-jobs`: one job that trains, and the questions one asks of such a job.

Owns arguments, what is printed and exit codes. What is sent is `launch_hf_order`'s; asking the Hub, following a job
and the checks before it are `jobs.hf`, `jobs.hf_follow` and `jobs.hf_preflight`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from harness_trainer.cli.launch_hf_order import Asked, add_options, again, asked_of, make, secret_values
from harness_trainer.errors import SetupError, TrainingFailed

if TYPE_CHECKING:
    from jobs.hf import HfApi, JobInfo, Order
    from jobs.hf_preflight import Check

_PROG = "harness-trainer launch hf-jobs"


def run(argv: Sequence[str]) -> int:
    from jobs.errors import JobsError

    action = ACTIONS.get(argv[0]) if argv else None
    try:
        return _submit(argv) if action is None else action(argv[1:])
    except JobsError as error:
        raise SetupError(str(error)) from error


def _submit(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} --flavor FLAVOR --timeout TIME [options of `train`]\n"
        f"       {_PROG} {{{','.join(ACTIONS)}}} ...",
    )
    add_options(parser)
    wanted = asked_of(parser.parse_args(argv))
    if wanted.dry_run:
        from jobs.hf import shown

        here = secret_values(wanted.secrets, os.environ)
        print(shown(make(wanted, {name: here.get(name, "") for name in wanted.secrets})))
        return 0
    from jobs.hf import client, find, namespace_of, stage_of
    from jobs.hf_preflight import check_secrets

    values = secret_values(wanted.secrets, os.environ)
    api = client(values.get("HF_TOKEN"))
    _require([*_checks(api, wanted), check_secrets(wanted.secrets, values)])
    namespace = namespace_of(api, wanted.namespace)
    alive = [job for job in find(api, namespace, wanted.run) if stage_of(job) in ("SCHEDULING", "RUNNING")]
    if alive:
        raise SetupError(
            f"job {alive[0].id} of run {wanted.run} is {stage_of(alive[0])}: follow it with "
            f"`{_PROG} logs {alive[0].id}`, or give another --run"
        )
    return _start(api, make(wanted, values), namespace, detach=wanted.detach)


def _checks(api: HfApi, wanted: Asked) -> list[Check]:
    from jobs.hf_preflight import check_e2b_key, check_flavor, check_repo, check_token

    checks = [check_token(api, wanted.namespace), check_flavor(api, wanted.flavor, wanted.timeout_s)]
    if "E2B_API_KEY" in wanted.secrets:
        checks.append(check_e2b_key(os.environ))
    if checks[0].ok:
        checks += [check_repo(api, repo) for repo in wanted.repos]
    return checks


def _require(checks: Iterable[Check]) -> None:
    """Say what was found. Raises SetupError, which names everything that is to be mended."""
    wrong = []
    for check in checks:
        print(f"{'ok' if check.ok else 'WRONG':5} {check.name}: {check.found}", file=sys.stderr)
        if not check.ok and check.required:
            wrong.append(f"{check.name}: {check.found} ({check.fix})")
    if wrong:
        raise SetupError(f"nothing was launched: {'; '.join(wrong)}")


def _start(api: HfApi, order: Order, namespace: str, *, detach: bool) -> int:
    from jobs.hf import submit

    job = submit(api, order)
    _say(f"job {job.id}: {job.url}")
    if detach:
        _say(f"follow it with `{_PROG} logs {job.id}`, end it with `{_PROG} cancel {job.id}`")
        print(job.id)
        return 0
    return _follow(api, job, namespace, timeout_s=order.timeout_s, secrets=order.secrets.values())


def _follow(api: HfApi, job: JobInfo, namespace: str, *, timeout_s: float | None, secrets: Iterable[str]) -> int:
    from jobs.hf import stage_of
    from jobs.hf_follow import Follower, how_it_ended
    from jobs.masking import Mask

    mask = Mask(secrets)
    follower = Follower(api, job, namespace, timeout_s=timeout_s, say=_say)
    try:
        for line in follower.lines():
            print(mask(line), flush=True)
    except KeyboardInterrupt:
        _say(f"the job goes on: `{_PROG} logs {job.id}` follows it, `{_PROG} cancel {job.id}` ends it")
        return 130
    if stage_of(follower.job) == "COMPLETED":
        _say(f"job {job.id}: {how_it_ended(follower.job)}")
        return 0
    raise TrainingFailed(
        f"job {job.id} ended: {how_it_ended(follower.job)}; go on from its last copy with `{_PROG} resume {job.id}`"
    )


# -- questions about a job ----------------------------------------------------------------------------------------


def _parse(name: str, argv: Sequence[str], about: str, *, job: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{_PROG} {name}", description=about)
    if job:
        parser.add_argument("job", help="its id")
    parser.add_argument("--namespace", help="user or organization that the job is of (default: the token's own)")
    if name == "resume":
        parser.add_argument("--flavor", help="another machine than last time")
        parser.add_argument("--timeout", help="another timeout than last time")
        parser.add_argument("--detach", action="store_true", help="do not follow it")
        parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    return parser.parse_args(argv)


def _status(argv: Sequence[str]) -> int:
    from jobs.hf import LABEL, client, inspect, namespace_of
    from jobs.hf_follow import how_it_ended

    options = _parse("status", argv, "What a job is, and how it is.")
    api = client()
    job = inspect(api, options.job, namespace_of(api, options.namespace))
    spent = job.durations
    facts = {
        "job": job.id,
        "run": (job.labels or {}).get(LABEL, "-"),
        "stage": how_it_ended(job),
        "flavor": getattr(job.flavor, "value", job.flavor),
        "created": job.created_at,
        "started": job.started_at or "-",
        "running": "-" if spent is None or spent.running_secs is None else f"{spent.running_secs} s",
        "exposed": ", ".join(job.status.expose_urls or []) or "-",
        "page": job.url,
    }
    for name, value in facts.items():
        print(f"{name:9} {value}")
    return 0


def _ls(argv: Sequence[str]) -> int:
    from jobs.hf import LABEL, client, find, namespace_of
    from jobs.hf_follow import how_it_ended

    options = _parse("ls", argv, "The jobs that were launched from here or elsewhere, newest first.", job=False)
    api = client()
    for job in find(api, namespace_of(api, options.namespace)):
        flavor = getattr(job.flavor, "value", job.flavor)
        print(f"{job.id}  {(job.labels or {}).get(LABEL, '-')}  {flavor}  {job.created_at}  {how_it_ended(job)}")
    return 0


def _logs(argv: Sequence[str]) -> int:
    from harness_trainer.cli.launch_hf_order import order_in
    from jobs.hf import client, inspect, namespace_of

    options = _parse("logs", argv, "Follow a job's log to its end.")
    api = client()
    namespace = namespace_of(api, options.namespace)
    job = inspect(api, options.job, namespace)
    inside = order_in(job)
    secrets = [os.environ.get(name, "") for name in inside.secrets]
    return _follow(api, job, namespace, timeout_s=inside.timeout_s, secrets=secrets)


def _cancel(argv: Sequence[str]) -> int:
    from jobs.hf import cancel, client, inspect, namespace_of
    from jobs.hf_follow import how_it_ended

    options = _parse("cancel", argv, "End a job. Its run goes on later with `resume`.")
    api = client()
    namespace = namespace_of(api, options.namespace)
    cancel(api, options.job, namespace)
    now = how_it_ended(inspect(api, options.job, namespace))
    _say(f"job {options.job}: {now}; `{_PROG} resume {options.job}` goes on")
    return 0


def _resume(argv: Sequence[str]) -> int:
    from jobs.hf import ENDED, client, inspect, namespace_of, seconds, shown, stage_of
    from jobs.hf_preflight import check_flavor, check_secrets

    options = _parse("resume", argv, "A new job that goes on where the last copy of an ended one is.")
    api = client()
    namespace = namespace_of(api, options.namespace)
    job = inspect(api, options.job, namespace)
    if stage_of(job) not in ENDED and not options.dry_run:
        raise SetupError(f"job {job.id} is {stage_of(job)}: end it first with `{_PROG} cancel {job.id}`")
    timeout_s = None if options.timeout is None else seconds(options.timeout)

    def order(values: dict[str, str]) -> Order:
        return again(job, namespace, values, flavor=options.flavor, timeout_s=timeout_s)

    names = list(order({}).secrets)
    values = secret_values(names, os.environ)
    new = order(values)
    if options.dry_run:
        print(shown(new))
        return 0
    _require([check_flavor(api, new.flavor, new.timeout_s), check_secrets(names, values)])
    return _start(api, new, namespace, detach=options.detach)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
    "ls": _ls,
}
