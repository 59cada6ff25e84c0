"""What is sent to Hugging Face Jobs, what its refusals mean, and a job followed through everything that goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from jobs.errors import JobsError
from jobs.hf import (
    LABEL,
    UV_IMAGE,
    Order,
    by_uv,
    cancel,
    client,
    find,
    inspect,
    seconds,
    shown,
    stage_of,
    submit,
    volume,
)
from jobs.hf_follow import Follower, Pace, Shown, how_it_ended
from jobs.hf_preflight import check_e2b_key, check_flavor, check_repo, check_secrets, check_token
from jobs.masking import Mask
from tests.jobs.standin import TOKEN, Job, Standin

SECRET = "e2b_0123456789abcdef"
QUICK = Pace(rejoin=0.01, look=0.05, overdue=0.2, unreachable=0.3)


def order(**changes: object) -> Order:
    given: dict[str, object] = {
        "command": ("echo", "hello"),
        "flavor": "a10g-large",
        "timeout_s": 3600,
        "image": "me/trainer:1",
        "env": {"A": "1"},
        "secrets": {"E2B_API_KEY": SECRET},
        "labels": {LABEL: "math", "name": "math"},
    }
    return Order(**{**given, **changes})  # type: ignore[arg-type]


# -- sending ------------------------------------------------------------------------------------------------------


def test_what_is_sent_is_what_is_shown(hub: Standin) -> None:
    wanted = order(public_ports=(8000,), attempts=3, volumes=(volume("hf://buckets/me/b/sub:/mnt:ro"),))
    job = submit(client(), wanted)
    spec = hub.job().spec
    assert spec["secrets"] == {"E2B_API_KEY": SECRET}
    assert (spec["timeoutSeconds"], spec["attempts"], spec["labels"][LABEL]) == (3600, 3, "math")
    assert spec["volumes"] == [
        {"type": "bucket", "source": "me/b", "mountPath": "/mnt", "readOnly": True, "path": "sub"}
    ]
    told = json.loads(shown(wanted))
    assert told["secrets"] == {"E2B_API_KEY": "***"}
    for theirs, ours in {
        "dockerImage": "image",
        **{name: name for name in ("command", "expose", "flavor", "labels")},
    }.items():
        assert spec[theirs] == told[ours]
    assert job.status.expose_urls == [f"https://{job.id}--8000.hf.jobs"]


def test_packages_are_run_by_uv_and_no_file_is_uploaded(hub: Standin) -> None:
    """What the client's own `run_uv_job` would send, which warns of being an experiment."""
    packages, program = ["harness-trainer==0.1.0"], ["harness-trainer", "launch", "inside"]
    submit(client(), order(image=UV_IMAGE, command=by_uv(packages, program), labels={"name": "math"}))
    with pytest.warns(UserWarning, match="experimental"):
        client().run_uv_job(
            program[0], script_args=program[1:], dependencies=packages, flavor="a10g-large", timeout=3600, name="math",
            env={"A": "1"}, secrets={"E2B_API_KEY": SECRET},
        )  # fmt: skip
    ours, theirs = (job.spec for job in hub.jobs.values())
    assert ours == theirs


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, "Invalid username or password."), "refuses the token.*hf auth login"),
        ((402, "Pre-paid credit balance is insufficient"), "credit.*billing"),
        ((403, "missing permissions: job.write"), "may not do this.*permission"),
        ((429, "too many"), "too many requests"),
        ((500, "oops"), "500"),
    ],
)
def test_a_refusal_says_what_to_do_and_never_a_secret(hub: Standin, answer: tuple[int, str], says: str) -> None:
    hub.refuses = (answer[0], f"{answer[1]} {SECRET}")
    with pytest.raises(JobsError, match=says) as raised:
        submit(client(), order())
    assert SECRET not in str(raised.value) and not hub.jobs


def test_a_wrong_flavor_is_refused_by_the_service_too(hub: Standin) -> None:
    with pytest.raises(JobsError, match="Invalid flavor"):
        submit(client(), order(flavor="a10g-lagre"))


def test_a_wrong_token_and_no_hub(hub: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobsError, match="the token.*refuses the token"):
        submit(client("hf_wrong_token"), order())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(JobsError, match="cannot be reached.*HF_ENDPOINT"):
        submit(client(), order(namespace="me"))


def test_jobs_are_found_by_run_and_ended(hub: Standin) -> None:
    api = client()
    first, other = submit(api, order()), submit(api, order(labels={LABEL: "code"}))
    submit(api, order(labels={"name": "not-ours"}))
    assert [job.id for job in find(api, "me", "math")] == [first.id]
    assert {job.id for job in find(api, "me")} == {first.id, other.id}
    cancel(api, first.id, "me")
    assert stage_of(inspect(api, first.id, "me")) == "CANCELED"
    with pytest.raises(JobsError, match="knows nothing|not on the Hub"):
        inspect(api, "0" * 24, "me")


def test_durations_and_volumes_are_read_as_people_write_them() -> None:
    assert [seconds(text) for text in ("90m", "6h", "2d", "45", "0.5h")] == [5400, 21600, 172800, 45, 1800]
    for wrong in ("", "6x", "-1h", "h", "0"):
        with pytest.raises(JobsError, match="no duration"):
            seconds(wrong)
    with pytest.raises(JobsError, match="--volume"):
        volume("buckets/me/b:/mnt")


def test_the_mask_takes_every_form_of_a_secret() -> None:
    mask = Mask(['a"b/c d\\e', "two lines-1\ntwo lines-2", "", "abc"])
    text = mask('raw a"b/c d\\e json a\\"b/c d\\\\e url a%22b%2Fc%20d%5Ce, two lines-2, abc')
    assert text == "raw *** json *** url ***, ***, abc"


# -- before -------------------------------------------------------------------------------------------------------


def test_checks_find_what_is_wrong_before_anything_costs(hub: Standin) -> None:
    api = client()
    assert check_token(api, "acme").ok and not check_token(api, "strangers").ok
    assert not check_token(client("hf_wrong_token")).ok
    good, wrong = check_flavor(api, "a10g-large", 7200), check_flavor(api, "a10g-lagre")
    assert good.ok and "$1.50 an hour, at most $3.00" in good.found
    assert not wrong.ok and "a10g-large" in wrong.fix
    assert not check_secrets(["A", "B"], {"A": "x", "B": " "}).ok and check_secrets(["A"], {"A": "x"}).ok
    assert [check_e2b_key({"E2B_API_KEY": key}).ok for key in ("", SECRET, "other")] == [False, True, True]
    hub.repos.add("me/there", {})
    assert check_repo(api, "me/there").ok and check_repo(api, "acme/new").ok and not check_repo(api, "google/new").ok
    hub.broken = 10**6
    assert not check_flavor(api, "a10g-large").ok


# -- following ----------------------------------------------------------------------------------------------------


def follower(hub: Standin, *, timeout_s: float | None = None, say: list[str] | None = None) -> tuple[Follower, Job]:
    api = client()
    job = submit(api, order())
    said = [] if say is None else say
    return Follower(api, job, "me", timeout_s=timeout_s, say=said.append, pace=QUICK), hub.job()


def play(job: Job, *lines: str, stage: str = "COMPLETED", message: str | None = None) -> None:
    """The job logs its lines and ends."""
    job.set("RUNNING")
    job.log(*lines)
    job.set(stage, message)


LINES = [f"line {number % 3}" for number in range(12)]  # repeated text, which must neither be lost nor merged


@pytest.fixture
def quick_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client's own pauses between two tries, without the waiting."""
    import huggingface_hub.hf_api

    monkeypatch.setattr(huggingface_hub.hf_api.time, "sleep", lambda s: threading.Event().wait(min(s, 0.01)))
    yield


@pytest.mark.usefixtures("quick_client")
@pytest.mark.parametrize("cuts", [[], [0], [3], [5, 7, 2, 9, 0, 11], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_every_line_comes_once_however_often_the_stream_is_cut(hub: Standin, cuts: list[int]) -> None:
    hub.cut_after = list(cuts)
    watching, job = follower(hub)
    play(job, *LINES)
    assert list(watching.lines()) == LINES
    assert hub.cut_after == [] and how_it_ended(watching.job) == "COMPLETED"


@pytest.mark.usefixtures("quick_client")
def test_lines_come_while_the_job_runs(hub: Standin) -> None:
    watching, job = follower(hub)
    job.set("RUNNING")
    lines = watching.lines()
    job.log("one")
    assert next(lines) == "one"
    hub.cut_after = [1]
    job.log("two")
    assert next(lines) == "two"
    job.set("ERROR", "preempted")
    assert list(lines) == [] and how_it_ended(watching.job) == "ERROR: preempted"


@pytest.mark.usefixtures("quick_client")
def test_a_service_that_is_away_for_a_while_costs_no_line(hub: Standin) -> None:
    watching, job = follower(hub)
    job.set("RUNNING")
    job.log("one")
    lines = watching.lines()
    assert next(lines) == "one"
    hub.broken, hub.cut_after = 4, [0]
    play(job, "two", "three")
    assert list(lines) == ["two", "three"]


@pytest.mark.usefixtures("quick_client")
def test_a_service_that_stays_away_is_given_up(hub: Standin) -> None:
    watching, _ = follower(hub)
    hub.broken = 10**6
    with pytest.raises(JobsError, match="503.*may still be running"):
        list(watching.lines())


@pytest.mark.usefixtures("quick_client")
def test_a_timeout_that_the_service_ignores_is_held_from_here(hub: Standin) -> None:
    said: list[str] = []
    watching, job = follower(hub, timeout_s=60.0, say=said)
    job.set("RUNNING")
    job.started = datetime.now(UTC) - timedelta(seconds=59)
    job.log("one")
    lines = watching.lines()
    assert next(lines) == "one" and not said
    job.started -= timedelta(seconds=2)
    assert list(lines) == []  # a silent stream, which only the end of the job ends
    assert how_it_ended(watching.job).startswith("CANCELED") and "over its timeout" in said[0] and len(said) == 1


def test_a_log_that_lost_its_beginning_is_said_to_have() -> None:
    shown_lines = Shown()
    assert list(shown_lines.beyond(["a", "b", "c"])) == ["a", "b", "c"]
    found = list(shown_lines.beyond(["c", "d"]))
    assert "lines may be missing" in found[0] and found[1:] == ["c", "d"]
    assert list(shown_lines.beyond(["c", "d", "e"])) == ["e"]


def test_the_token_is_not_in_what_is_asked(hub: Standin) -> None:
    submit(client(), order())
    assert not any(TOKEN in path or SECRET in path for path in hub.asked)
