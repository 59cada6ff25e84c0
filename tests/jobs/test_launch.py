"""`harness-trainer launch hf-jobs` from the command line to the stand-in service, and back."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_trainer.cli import main
from harness_trainer.cli.launch_hf_packages import PYTHON
from harness_trainer.cli.launch_inside import age_of_job, read_order, with_address
from harness_trainer.errors import ConfigError
from jobs.errors import JobsError
from jobs.hf import LABEL, ORDER, UV_IMAGE
from tests.jobs.standin import TOKEN, Job, Standin

KEY = "e2b_0123456789abcdef"
USUAL = ["--flavor", "a10g-large", "--timeout", "6h", "--image", "me/trainer:1", "--runs", "me/runs", "--run", "math"]
E2B = ["--sandbox", "e2b", "--tasks", "hf:me/tasks"]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)


def launch(*arguments: str) -> int:
    return main(["launch", "hf-jobs", *arguments])


def played(hub: Standin, play: Callable[[Job], None]) -> None:
    """The next job, once it is there."""
    before = len(hub.jobs)

    def wait() -> None:
        end = time.monotonic() + 20
        while len(hub.jobs) == before and time.monotonic() < end:
            time.sleep(0.01)
        play(hub.job())

    threading.Thread(target=wait, daemon=True).start()


def ends(stage: str, message: str | None = None, *lines: str) -> Callable[[Job], None]:
    def play(job: Job) -> None:
        job.set("RUNNING")
        job.log(*lines)
        job.set(stage, message)

    return play


# -- what is sent -------------------------------------------------------------------------------------------------


def test_dry_run_shows_what_would_be_sent_without_asking_anybody(
    hub: Standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wandb-0123456789")
    arguments = [*USUAL, *E2B, "--secret", "WANDB_API_KEY", "--variable", "LEVEL=2", "--final", "acme/model"]
    assert launch(*arguments, "--dry-run") == 0
    assert hub.asked == []
    text = capsys.readouterr().out
    told = json.loads(text)
    assert told["secrets"] == {"E2B_API_KEY": "***", "HF_TOKEN": "***", "WANDB_API_KEY": "***"}
    assert not any(secret in text for secret in (KEY, TOKEN, "wandb-0123456789"))
    played(hub, ends("COMPLETED"))
    assert launch(*arguments) == 0
    spec = hub.job().spec
    assert spec["secrets"] == {"E2B_API_KEY": KEY, "HF_TOKEN": TOKEN, "WANDB_API_KEY": "wandb-0123456789"}
    sent = {name: json.loads(value) if name == ORDER else value for name, value in spec["environment"].items()}
    assert sent == told["environment"] and sent["LEVEL"] == "2"
    for theirs, ours in {"dockerImage": "image", "timeoutSeconds": "timeoutSeconds"}.items():
        assert spec[theirs] == told[ours]
    for name in ("command", "flavor", "labels", "expose"):
        assert spec[name] == told[name]


def test_a_secret_is_masked_wherever_it_stands(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        launch(*USUAL, *E2B, "--variable", f"NOTE=call {KEY}", "--learner.report-to", f'["{TOKEN}"]', "--dry-run") == 0
    )
    text = capsys.readouterr().out
    assert KEY not in text and TOKEN not in text and "call ***" in text


def test_the_gateway_is_opened_by_the_services_own_proxy_unless_another_way_is_chosen(hub: Standin) -> None:
    for more, ports, way in (
        ([], [8000], {"type": "direct", "listen": "0.0.0.0:8000"}),
        (["--expose", "cloudflared"], [], {"type": "cloudflared", "binary": "cloudflared"}),
        (["--gateway.public-url", "https://gate.example"], [], {"type": "none"}),
        (["--sandbox", "local"], [], {"type": "none"}),
    ):
        assert launch(*USUAL, *E2B, *more, "--detach", "--run", f"r{len(hub.jobs)}") == 0
        spec = hub.job().spec
        order = json.loads(spec["environment"][ORDER])
        assert spec.get("expose", {"ports": []})["ports"] == ports
        assert order["config"]["gateway"]["expose"] == way and order["proxied_port"] == (8000 if ports else None)


def test_in_the_job_the_address_is_the_services(hub: Standin) -> None:
    assert launch(*USUAL, *E2B, "--detach") == 0
    order = read_order(hub.job().spec["environment"])
    config = with_address(order, {"JOB_ID": hub.job().id})
    assert config["gateway"]["public_url"] == f"https://{hub.job().id}--8000.hf.jobs"
    with pytest.raises(JobsError, match="JOB_ID"):
        with_address(order, {})
    hub.job().spec["expose"] = {"ports": []}
    with pytest.raises(JobsError, match="no address for port 8000"):
        with_address(order, {"JOB_ID": hub.job().id}, within_s=0.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--timeout", "6x"], "no duration"),
        (["--timeout", "4m"], "no time to train"),
        (["--secret", "KEY=value"], "give the name alone"),
        (["--variable", "MY_API_KEY=abc"], "looks like a secret"),
        (["--variable", "LEVEL"], "NAME=VALUE"),
        (["--runs", "me"], "OWNER/REPO"),
        (["--runs", "/mnt/runs"], "in no --volume"),
        (["--runs", "/mnt/runs", "--volume", "hf://buckets/me/b:/mnt:ro"], "in no --volume"),
        (["--run", "a b"], "letters"),
        (["--sandbox", "docker"], "no Docker engine"),
        (["--tasks", "mine"], "path of this machine"),
        (["--rollouts.reward", "mine:score"], "path of this machine"),
        (["--volume", "mine:/mnt"], "--volume"),
        (["--rollouts.group-size", "1"], "group_size"),
        (["--package", "git+https://a_value@host/me/trainer.git"], "whoever sees the job sees its command"),
    ],
)
def test_bad_arguments_are_found_before_anybody_is_asked(
    hub: Standin, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    assert launch(*USUAL, *E2B, *arguments) in (2, 3)
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert hub.asked == [] and "value" not in error.replace("value is taken", "")


def test_without_image_or_package_both_are_named(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for word in USUAL if word not in ("--image", "me/trainer:1")]
    assert launch(*arguments, *E2B) == 2
    assert "--image" in (error := capsys.readouterr().err) and "--package" in error
    package = "harness-trainer[e2b]==0.1.0"
    assert launch(*arguments, *E2B, "--package", package, "--harness", "pyagent:3,gptme:1", "--detach") == 0
    assert hub.job().spec["command"][:4] == ["uv", "run", "--with", package]
    assert json.loads(hub.job().spec["environment"][ORDER])["setup"] == ["engine"]


OURS = "harness-trainer==0.1.0"
WITH_E2B = "harness-trainer[e2b]==0.1.0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--package", OURS, "--harness", "pyagent"], "'harness-trainer[e2b]==VERSION'"),
        (["--package", "harness_trainer[docker]", "--harness", "pyagent"], "comes without E2B's SDK"),
        (["--package", "git+https://host/me/harness-trainer.git", "--harness", "pyagent"], "[e2b] @ git+https"),
        (["--package", WITH_E2B, "--harness", "pyagent", "--tasks", "examples"], "no package has them"),
        (["--package", WITH_E2B, "--harness", "pyagent", "--tasks", "hf:me/tasks,moon"], "--tasks moon"),
        (["--package", WITH_E2B, "--harness", "pyagent", "--rollouts.evaluation.tasks", "examples"], "no package has"),
        (["--package", WITH_E2B], "--harness opencode needs Node.js and npm"),
        (["--package", WITH_E2B, "--harness", "pyagent:3,codex:1"], "--harness codex needs Node.js and npm"),
        (["--package", WITH_E2B, "--harness", "mini-swe-agent"], "needs Python 3.11"),
    ],
)
def test_packages_that_the_run_cannot_start_from_are_refused(
    hub: Standin, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    usual = [word for word in USUAL if word not in ("--image", "me/trainer:1")]
    assert launch(*usual, *E2B, *arguments, "--detach") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert hub.asked == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--package", "harness-trainer[all] @ git+https://host/me/trainer", "--harness", "openhands"],
        ["--package", OURS, "--package", "e2b==2.63.0", "--harness", "pyagent"],
        ["--package", "git+https://host/me/fork.git", "--harness", "pyagent"],  # nobody knows what it brings
        ["--package", OURS, "--sandbox", "local", "--harness", "cmd:python agent.py"],
        ["--package", WITH_E2B, "--image", "me/uv-and-node:1"],
        ["--package", WITH_E2B, "--harness", "/job/agent.yaml"],
    ],
)
def test_packages_that_may_do_are_sent(hub: Standin, arguments: list[str]) -> None:
    usual = [word for word in USUAL if word not in ("--image", "me/trainer:1")]
    assert launch(*usual, *E2B, *arguments, "--dry-run") == 0


def test_the_image_that_packages_go_into_has_the_python_that_is_counted_on() -> None:
    assert f":python{PYTHON}-" in UV_IMAGE


# -- before it costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (["--flavor", "a10g-lagre"], {}, "flavor a10g-lagre: not offered.*a10g-large"),
        ([], {"HF_TOKEN": "hf_wrong_token"}, "refuses the token.*hf auth login"),
        ([], {"E2B_API_KEY": ""}, "E2B_API_KEY is not set"),
        (["--secret", "NOT_HERE"], {}, "not set here: NOT_HERE"),
        (["--namespace", "strangers"], {}, "not in strangers"),
        (["--runs", "google/runs"], {}, "may make none of google"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_launched(
    hub: Standin,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch(*USUAL, *E2B, *arguments) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("harness-trainer: nothing was launched")
    import re

    assert re.search(says, last) and not hub.jobs


def test_a_run_that_has_a_living_job_gets_no_second_one(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*USUAL, *E2B, "--detach") == 0
    assert launch(*USUAL, *E2B) == 3
    assert f"logs {hub.job().id}" in capsys.readouterr().err and len(hub.jobs) == 1


# -- how it ends --------------------------------------------------------------------------------------------------


def test_a_job_that_is_done_has_shown_its_log_without_secrets(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    played(hub, ends("COMPLETED", None, "step 1", f"careless: {KEY}"))
    assert launch(*USUAL, *E2B) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == ["step 1", "careless: ***"]
    assert f"job {hub.job().id}: COMPLETED" in told.err and KEY not in told.err


@pytest.mark.parametrize(("stage", "message"), [("ERROR", "preempted"), ("CANCELED", "spot"), ("DELETED", None)])
def test_a_job_that_was_taken_away_says_how_to_go_on(
    hub: Standin, capsys: pytest.CaptureFixture[str], stage: str, message: str | None
) -> None:
    played(hub, ends(stage, message, "step 1"))
    assert launch(*USUAL, *E2B) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"ended: {stage}" in last and f"`harness-trainer launch hf-jobs resume {hub.job().id}`" in last


def test_resume_launches_the_same_with_secrets_of_now(
    hub: Standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = ["--volume", "hf://buckets/me/data:/data:ro", "--attempts", "2"]
    assert launch(*USUAL, *E2B, *volume, "--detach") == 0
    old = hub.job()
    assert launch("resume", old.id) == 3  # it still lives
    old.set("ERROR", "preempted")
    monkeypatch.setenv("E2B_API_KEY", "e2b_another_key")
    capsys.readouterr()
    assert launch("resume", old.id, "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["secrets"] == {"E2B_API_KEY": "***", "HF_TOKEN": "***"}
    assert launch("resume", old.id, "--timeout", "12h", "--detach") == 0
    new = hub.job()
    assert new.id != old.id and new.spec["timeoutSeconds"] == 12 * 3600
    assert new.spec["secrets"] == {"E2B_API_KEY": "e2b_another_key", "HF_TOKEN": TOKEN}
    for name in ("command", "labels", "volumes", "flavor", "dockerImage", "expose"):
        assert new.spec[name] == old.spec[name]
    before, after = (json.loads(job.spec["environment"][ORDER]) for job in (old, new))
    assert before | {"timeout_s": 43200.0, "margin_s": after["margin_s"]} == after


def test_questions_about_jobs(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*USUAL, *E2B, "--detach") == 0
    job = hub.job()
    assert capsys.readouterr().out == f"{job.id}\n"
    job.set("RUNNING")
    assert launch("status", job.id) == 0
    told = capsys.readouterr().out
    assert "stage     RUNNING" in told and "run       math" in told and f"{job.id}--8000.hf.jobs" in told
    assert launch("ls") == 0 and f"{job.id}  math  a10g-large" in capsys.readouterr().out
    assert launch("cancel", job.id) == 0 and job.stage == "CANCELED"
    assert f"resume {job.id}" in capsys.readouterr().err
    assert launch("logs", job.id) == 6
    assert launch("status", "0" * 24) == 3


def test_a_job_of_somebody_else_is_none_of_ours(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*USUAL, *E2B, "--detach") == 0
    del hub.job().spec["environment"][ORDER]
    assert launch("resume", hub.job().id, "--dry-run") == 2
    assert "none of harness-trainer's" in capsys.readouterr().err


def test_an_order_of_another_version_is_one_line() -> None:
    with pytest.raises(ConfigError, match="another version"):
        read_order({ORDER: json.dumps({"run": "math"})})
    with pytest.raises(ConfigError, match="is not set"):
        read_order({})


def test_help_answers_without_the_hubs_library() -> None:
    import subprocess

    code = "import sys; from harness_trainer.cli import main\ntry: main(['launch','hf-jobs','--help'])\n"
    code += "except SystemExit: pass\nassert 'huggingface_hub' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_was_installed_before_the_jobs_own_process_is_of_its_time(
    hub: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    from datetime import UTC, datetime, timedelta

    assert launch(*USUAL, "--sandbox", "local", "--detach") == 0
    job, order = hub.job(), read_order(hub.job().spec["environment"])
    where = {"JOB_ID": job.id}
    assert age_of_job(order, where) == 0, "the service does not say"
    job.started = datetime.now(UTC) - timedelta(minutes=7)
    assert age_of_job(order, where) == pytest.approx(420, abs=10)
    job.started = datetime.now(UTC) + timedelta(minutes=7)
    assert age_of_job(order, where) == 0, "a clock is wrong"
    assert age_of_job(order, {"JOB_ID": "another"}) == 0 and "WARNING" in capsys.readouterr().err
    assert age_of_job(order, {}) == 0


# -- all of it, in real processes ---------------------------------------------------------------------------------


def test_a_killed_jobs_run_is_finished_by_the_next_one(hub: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    """The job's own process as the service would run it, but for what trains; ended by the service, then resumed."""
    hub.plays = False
    root = Path(__file__).parents[2]
    program = "\n".join(
        (
            "import sys",
            f"sys.path.insert(0, {str(root)!r})",
            "from harness_trainer.cli import launch_inside",
            f"train, check = [{sys.executable!r}, '-m', 'tests.jobs.playing_train'], ['true']",
            "sys.exit(launch_inside.run([], train=train, check=check))",
        )
    )
    order = {
        "config": {"steps": 400, "pause_s": 0.05, "save_steps": 3},
        "run": "math",
        "runs": "me/runs",
        "timeout_s": 600,
        "margin_s": 60,
        "secrets": ["HF_TOKEN", "E2B_API_KEY"],
        "final": "me/model",
    }
    from jobs.hf import Order, cancel, client, submit

    def start(steps: int) -> Job:
        order["config"]["steps"] = steps  # type: ignore[index]
        env = {ORDER: json.dumps(order), "PYTHONPATH": str(root)}
        secrets = {"HF_TOKEN": TOKEN, "E2B_API_KEY": KEY}
        command = (sys.executable, "-c", program)
        submit(client(), Order("me/t:1", command, "cpu-basic", 600, env=env, secrets=secrets, labels={LABEL: "math"}))
        return hub.job()

    def wait(job: Job, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not until() and not job.is_over and time.monotonic() < end:
            time.sleep(0.05)

    first = start(400)
    wait(first, lambda: any("copied step" in line for line in first.lines))
    cancel(client(), first.id, "me")
    text = "\n".join(first.lines)
    assert "this machine was told to go" in text and "sandboxes are closed" in text and KEY not in text, text
    saved = max(int(line.split("copied step ")[1].split()[0]) for line in first.lines if "copied step" in line)
    second = start(saved + 4)
    assert launch("logs", second.id) == 0
    told = capsys.readouterr().out
    assert f"going on after step {saved}" in told and "the run is over" in told
    assert "the trained model is at" in told and "config.json" in hub.repos.files("me/model")


@pytest.mark.parametrize(
    "arguments",
    [
        E2B,
        ["--sandbox", "harbor:daytona", "--learner.objective.kl-coef", "0.1"],
        ["--env", "class:/data/games.py:Game", "--tasks", "/data/rows.jsonl"],
        ["--tasks", "ors:me/environment"],
    ],
)
def test_the_job_trains_with_exactly_the_config_that_was_resolved_here(
    hub: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    import yaml

    assert launch(*USUAL, *arguments, "--learner.max-steps", "7", "--dry-run") == 0
    config = json.loads(capsys.readouterr().out)["environment"][ORDER]["config"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == config and config["learner"]["max_steps"] == 7
