"""Hugging Face Jobs through `huggingface_hub`: what is sent, and the questions that are asked of a job.

Owns the order (`Order`), its form for people with secrets masked, and what the Hub's errors mean. Following a job is
`hf_follow`'s, checks before it `hf_preflight`'s. Called by the command line and inside the job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from jobs.errors import JobsError
from jobs.masking import MASK, Mask

if TYPE_CHECKING:  # under these names for callers too, who must not import the library themselves
    from huggingface_hub import HfApi as HfApi
    from huggingface_hub import JobInfo as JobInfo
    from huggingface_hub import Volume as Volume

LABEL = "harness-trainer"  # key of the label that every job of ours has: the run's name
ORDER = "HARNESS_TRAINER_JOB"  # variable with what the process in the job is to do, as JSON
UV_IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"  # the one that the Hub runs uv's jobs in by default
ENDED = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
_VOLUME = re.compile(r"hf://(?:(buckets|datasets|models|spaces)/)?([\w.-]+/[\w.-]+)(/[^:]+)?:(/[^:]*)(?::(ro|rw))?")
_KINDS = {"buckets": "bucket", "datasets": "dataset", "models": "model", "spaces": "space"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """One job.

    Example: Order(image="me/trainer:1", command=("harness-trainer", "launch", "inside"), flavor="a10g-large",
    timeout_s=21600, env={ORDER: "{..}"}, secrets={"E2B_API_KEY": "e2b_.."}, labels={LABEL: "math", "name": "math"}).
    """

    image: str  # or hf.co/spaces/OWNER/NAME
    command: tuple[str, ...]
    flavor: str
    timeout_s: int
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)  # without a `name` among them the client makes one up
    volumes: tuple[Volume, ...] = ()
    public_ports: tuple[int, ...] = ()  # opened to everybody by the service's own proxy
    attempts: int | None = None  # None = one
    namespace: str | None = None  # None = the token's own


def saved_token() -> str | None:
    """The Hub's token of this person: of HF_TOKEN, or of the file that `hf auth login` writes."""
    from huggingface_hub import get_token

    return get_token()


def by_uv(packages: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """A command of packages that uv installs first, as the client's `run_uv_job` writes it."""
    return ("uv", "run", *(word for package in packages for word in ("--with", package)), *command)


def client(token: str | None = None) -> HfApi:
    """The Hub that $HF_ENDPOINT names, read now: the library itself reads it when it is imported."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


def shown(order: Order) -> str:
    """Exactly what `submit` would send, as JSON, every secret's value masked wherever it stands.

    Our own order, which is sent as text, is laid open.
    """
    sent: dict[str, Any] = {
        "namespace": order.namespace or "(the token's own)",
        "image": order.image,
        "command": list(order.command),
        "environment": {name: json.loads(value) if name == ORDER else value for name, value in order.env.items()},
        "secrets": dict.fromkeys(sorted(order.secrets), MASK),
        "flavor": order.flavor,
        "timeoutSeconds": order.timeout_s,
        "labels": dict(order.labels),
        "volumes": [volume.to_dict() for volume in order.volumes],
        "expose": {"ports": list(order.public_ports), "portsPublic": list(order.public_ports)},
        "attempts": order.attempts or 1,
    }
    return Mask(order.secrets.values())(json.dumps(sent, indent=2, ensure_ascii=False))


def submit(api: HfApi, order: Order) -> JobInfo:
    """Start it. Raises JobsError."""
    namespace = namespace_of(api, order.namespace)

    def send() -> JobInfo:
        return api.run_job(
            image=order.image,
            command=list(order.command),
            env=dict(order.env),
            secrets=dict(order.secrets),
            flavor=order.flavor,
            timeout=order.timeout_s,
            labels=dict(order.labels),
            volumes=list(order.volumes) or None,
            expose_public=list(order.public_ports) or None,
            attempts=order.attempts,
            namespace=namespace,
        )

    return asked(send, f"the job (flavor {order.flavor})", Mask(order.secrets.values()))


def namespace_of(api: HfApi, given: str | None) -> str:
    """Raises JobsError when the token is refused."""
    return given or str(asked(api.whoami, "the token")["name"])


def inspect(api: HfApi, job_id: str, namespace: str) -> JobInfo:
    return asked(lambda: api.inspect_job(job_id=job_id, namespace=namespace), f"job {job_id}")


def cancel(api: HfApi, job_id: str, namespace: str) -> None:
    asked(lambda: api.cancel_job(job_id=job_id, namespace=namespace), f"job {job_id}")


def find(api: HfApi, namespace: str, run: str | None = None) -> list[JobInfo]:
    """Jobs that we started, newest first; of one run, or of all."""
    labels = None if run is None else {LABEL: run}
    found = asked(lambda: list(api.list_jobs(labels=labels, namespace=namespace)), "the list of jobs")
    # A service that ignores a filter it does not know must not show us strangers' jobs as ours.
    ours = [job for job in found if LABEL in (job.labels or {}) and run in (None, (job.labels or {})[LABEL])]
    return sorted(ours, key=lambda job: job.created_at.timestamp() if job.created_at else 0.0, reverse=True)


def stage_of(job: JobInfo) -> str:
    """ "RUNNING", ...: the library gives text or an enum."""
    stage = job.status.stage
    return str(getattr(stage, "value", stage))


def volume(text: str) -> Volume:
    """`hf://buckets/owner/name:/mount[:ro]`, as the Hub's own command line writes it. Raises JobsError."""
    from huggingface_hub import Volume

    found = _VOLUME.fullmatch(text)
    if found is None:
        raise JobsError(
            f"--volume {text!r}: write hf://buckets/OWNER/NAME:/MOUNT or hf://datasets/OWNER/NAME:/MOUNT:ro"
        )
    kind, source, path, mount, mode = found.groups()
    options: dict[str, Any] = {} if mode is None else {"read_only": mode == "ro"}
    if path:
        options["path"] = path.strip("/")
    return Volume(type=_KINDS[kind or "models"], source=source, mount_path=mount, **options)


def seconds(text: str) -> int:
    """`90m`, `6h`, `2d`, `3600`. Raises JobsError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        found = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise JobsError(f"--timeout {text!r} is no duration: write 90m, 6h, 2d or seconds")
    return found


@contextmanager
def explained(what: str, mask: Mask | None = None) -> Iterator[None]:
    """Whatever goes wrong with the Hub, as JobsError: one line that says what to do."""
    from huggingface_hub import errors

    # The base of its HTTP client's errors, whichever client that is in this release.
    http_error: type[BaseException] = next(
        kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"
    )

    hide = mask or Mask(())
    try:
        yield
    except errors.RepositoryNotFoundError as e:
        raise JobsError(
            hide(f"{what}: not on the Hub, or the token may not see it ({_said(e)}); check name and token")
        ) from e
    except errors.HfHubHTTPError as e:
        raise JobsError(hide(f"{what}: {_meaning(e)}")) from e
    except errors.LocalTokenNotFoundError as e:
        raise JobsError(f"{what}: there is no Hugging Face token; run `hf auth login`, or set HF_TOKEN") from e
    except (http_error, OSError) as e:
        raise JobsError(
            hide(f"{what}: the Hub cannot be reached ({_said(e)}); check the network and HF_ENDPOINT")
        ) from e
    except (ValueError, RuntimeError) as e:
        raise JobsError(hide(f"{what}: {_said(e)}")) from e


def asked(question: Callable[[], T], what: str, mask: Mask | None = None) -> T:
    """The answer. Raises JobsError."""
    with explained(what, mask):
        return question()


def _meaning(error: Any) -> str:
    status, said = error.response.status_code, str(error.server_message or "").strip() or _said(error)
    if status == 401:
        return f"the Hub refuses the token ({said}); run `hf auth login`, or set HF_TOKEN to one that is valid"
    if status == 402:
        return f"the account has no credit for it ({said}); see https://huggingface.co/settings/billing"
    if status == 403:
        return f"the token may not do this ({said}); make one with the permission to start and manage jobs"
    if status == 404:
        return f"the Hub knows nothing of it ({said}); check the id and --namespace"
    if status in (400, 422):
        return f"the Hub takes it not as it is ({said})"
    if status == 429:
        return f"too many requests ({said}); wait a while and try again"
    return f"the Hub answered {status} ({said}); try again"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
