"""task.toml: what each of Harbor's fields comes to, and what is refused rather than passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness_trainer.errors import TaskError
from harness_trainer.tasks import Artifact, Task, find_tasks, load_task, load_tasks, resolve_box, resolve_solution_env
from sandboxes.base import BoxSpec, Healthcheck, Limits, Network, NetworkMode

Load = Callable[..., Task]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a task folder with the given task.toml and further files, and reads it."""

    def load(toml: str = "", files: dict[str, str] | None = None) -> Task:
        folder = tmp_path / "a-task"
        for name, text in {"instruction.md": "Do it.", "tests/test.sh": "true", **(files or {})}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "task.toml").write_text(toml)
        return load_task(folder)

    return load


DOCKERFILE = {"environment/Dockerfile": "FROM python:3.12-slim\n"}


def test_every_field_of_the_environment_becomes_part_of_the_box(load: Load, tmp_path: Path) -> None:
    toml = """
[agent]
user = 1001
[environment]
build_timeout_sec = 90
docker_image = "acme/base:1"
cpus = 1.5
memory_mb = 2048
storage_mb = 4096
gpus = 0
workdir = "/srv/app/"
network_mode = "allowlist"
allowed_hosts = ["Mirror.Example.", "*.files.example", "192.0.2.1", "2001:db8::1"]
env = { KEY = "${KEY:-none}", PLAIN = "x${y}" }
[environment.healthcheck]
command = "test -f /ready"
interval_sec = 0.5
timeout_sec = 2
start_period_sec = 10
start_interval_sec = 1
retries = 7
"""
    task = load(toml, DOCKERFILE)
    assert task.box == BoxSpec(
        "a-task",
        build_dir=tmp_path / "a-task" / "environment",
        image="acme/base:1",
        env={"KEY": "${KEY:-none}", "PLAIN": "x${y}"},
        workdir="/srv/app",
        user="1001",
        limits=Limits(cpus=1.5, memory_mb=2048, disk_mb=4096),
        network=Network(
            NetworkMode.ALLOWLIST, ("mirror.example:*", "*.files.example:*", "192.0.2.1:*", "[2001:db8::1]:*")
        ),
        healthcheck=Healthcheck("test -f /ready", 0.5, 2.0, 10.0, 1.0, 7),
        build_timeout_s=90.0,
    )
    assert task.findings == ()


def test_what_is_absent_has_harbors_defaults(load: Load) -> None:
    task = load("[environment.healthcheck]\ncommand = 'true'", DOCKERFILE)
    assert task.box.limits == Limits() and task.box.build_timeout_s == 600.0 and task.box.user is None
    assert task.box.healthcheck == Healthcheck("true", 5.0, 30.0, 0.0, 5.0, 3)
    assert (task.verifier_user, task.verifier_network, task.verifier_fresh) == (None, None, False)
    assert (task.artifacts, task.solution_dir, task.solution_env) == ((), None, {})


PROXY, PUBLIC, NONE = (Network(mode) for mode in (NetworkMode.PROXY_ONLY, NetworkMode.PUBLIC, NetworkMode.NONE))
LISTED = Network(NetworkMode.ALLOWLIST, ("a.example:*",))


@pytest.mark.parametrize(
    ("toml", "agent", "tests"),
    [
        ("", PROXY, None),
        ("[environment]\nnetwork_mode = 'public'", PUBLIC, PUBLIC),
        ("[environment]\nnetwork_mode = 'no-network'", PROXY, NONE),
        ("[environment]\nallow_internet = true", PUBLIC, PUBLIC),
        ("[environment]\nallow_internet = false", PROXY, NONE),
        ("[environment]\nallow_internet = false\nnetwork_mode = 'public'", PUBLIC, PUBLIC),  # the newer field wins
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']", LISTED, LISTED),
        ("[environment]\nnetwork_mode = 'allowlist'", Network(NetworkMode.ALLOWLIST), Network(NetworkMode.ALLOWLIST)),
        ("[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'no-network'", PROXY, PUBLIC),
        ("[environment]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'", PROXY, PUBLIC),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']", LISTED, None),
        ("[verifier]\nnetwork_mode = 'public'", PROXY, PUBLIC),
    ],
)
def test_networks_of_agent_and_tests(load: Load, toml: str, agent: Network, tests: Network | None) -> None:
    task = load(toml, DOCKERFILE)
    assert (task.box.network, task.verifier_network) == (agent, tests)


@pytest.mark.parametrize(
    "toml",
    [
        "memory = '2G'",
        "memory = ' 2048m'",
        "memory = '2097152K'",
        "memory_mb = 2048",
        "memory = '2G'\nmemory_mb = 2048",
    ],
)
def test_older_forms_of_a_size_are_read(load: Load, toml: str) -> None:
    assert load(f"[environment]\n{toml}", DOCKERFILE).box.limits.memory_mb == 2048
    assert load(f"[environment]\n{toml.replace('memory', 'storage')}", DOCKERFILE).box.limits.disk_mb == 2048


def test_artifacts_are_paths_or_tables(load: Load) -> None:
    toml = """
[[artifacts]]
source = "/app/out"
[[artifacts]]
source = "report.txt"
destination = "r/report.txt"
service = "main"
[[artifacts]]
source = "/app"
exclude = ["*.o"]
"""
    assert load("artifacts = ['/app/out']", DOCKERFILE).artifacts == (Artifact("/app/out"),)
    assert load(toml, DOCKERFILE).artifacts == (
        Artifact("/app/out"),
        Artifact("report.txt", "r/report.txt"),
        Artifact("/app", exclude=("*.o",)),
    )


def test_tests_phase_and_solution(load: Load, tmp_path: Path) -> None:
    toml = "[verifier]\nuser = 'judge'\nenvironment_mode = 'separate'\n[solution.env]\nSEED = '${SEED:-7}'"
    task = load(toml, {**DOCKERFILE, "solution/solve.sh": "true"})
    assert (task.verifier_user, task.verifier_fresh) == ("judge", True)
    assert any(finding.startswith("separate_verifier:") for finding in task.findings)
    assert task.solution_dir == tmp_path / "a-task" / "solution"
    assert resolve_solution_env(task, {}) == {"SEED": "7"} and task.solution_env == {"SEED": "${SEED:-7}"}


def test_secrets_of_the_environment_are_filled_in_only_at_use(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load("[environment.env]\nTOKEN = '${HUB_TOKEN}'", DOCKERFILE)
    assert "s3cret" not in repr(task) and task.box.env == {"TOKEN": "${HUB_TOKEN}"}
    assert resolve_box(task, {"HUB_TOKEN": "s3cret"}).env == {"TOKEN": "s3cret"}
    monkeypatch.delenv("HUB_TOKEN", raising=False)
    with pytest.raises(TaskError, match=r"its environment needs HUB_TOKEN; set it: export HUB_TOKEN="):
        load_tasks(task.path)  # before a run, not in the middle of it


@pytest.mark.parametrize(
    ("toml", "files", "words"),
    [
        ("[environment]\ngpus = 1", {}, ["gpus", "no GPU"]),
        ("[environment]\ngpus = true", {}, ["gpus", "whole number"]),
        ("[environment]\ntpu = {type = 'v6e', topology = '2x4'}", {}, ["tpu"]),
        ("[[environment.mcp_servers]]\nname = 'm'\nurl = 'http://m'", {}, ["mcp_servers"]),
        ("[[verifier.collect]]\ncommand = 'dump'", {}, ["verifier.collect", "test.sh"]),
        ("[environment]\nnetwork_mode = 'proxy-only'", {}, ["network_mode", "no-network, public, allowlist"]),
        ("[environment]\nallowed_hosts = ['a.example']", {}, ["allowed_hosts", "network_mode", "allowlist"]),
        ("[agent]\nnetwork_mode = 'public'\nallowed_hosts = ['a.example']", {}, ["[agent]", "allowlist"]),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.0/8']", {}, ["range", "10.0.0.0/8"]),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example:443']", {}, ["has a port"]),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a*.example']", {}, ["host names"]),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a']", {}, ["allowed_hosts"]),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = 'a.example'", {}, ["must be a list"]),
        ("[environment]\nallow_internet = 'no'", {}, ["allow_internet", "true or false"]),
        ("[environment]\ncpus = inf", {}, ["`environment.cpus`", "above 0"]),
        ("[environment]\ncpus = 0", {}, ["`environment.cpus`"]),
        ("[environment]\nmemory_mb = 0.5", {}, ["`environment.memory_mb`", "whole"]),
        ("[environment]\nmemory = '2T'", {}, ["`environment.memory`", "memory_mb"]),
        ("[environment]\nmemory = 2", {}, ["`environment.memory`", "2G"]),
        ("[environment]\nmemory = 'infG'", {}, ["`environment.memory`"]),
        ("[environment]\nmemory = '2G'\nmemory_mb = 512", {}, ["2048 MB", "512 MB"]),
        ("[environment]\nworkdir = 'app'", {}, ["`environment.workdir`", "absolute"]),
        ("[environment]\nenv = {A = 1}", {}, ["`environment.env.A`", "quotes"]),
        ("[environment]\nenv = {'A=B' = 'x'}", {}, ["`environment.env`", "="]),
        ("[environment]\nbuild_timeout_sec = -1", {}, ["`environment.build_timeout_sec`"]),
        ("[environment]\nhealthcheck = 'true'", {}, ["`environment.healthcheck` must be a table"]),
        ("[environment.healthcheck]\nretries = 3", {}, ["`environment.healthcheck.command`"]),
        ("[environment.healthcheck]\ncommand = 'x'\nretries = 0", {}, ["`environment.healthcheck.retries`"]),
        ("[agent]\nuser = ''", {}, ["`agent.user`"]),
        ("[agent]\nuser = true", {}, ["`agent.user`", "True"]),
        ("[verifier]\nenvironment_mode = 'other'", {}, ["environment_mode", "shared, separate"]),
        ("[verifier.environment]\ncpus = 2", {}, ["[verifier.environment] is not supported"]),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 2", {}, ["exclude each other"]),
        ("[verifier]\nenvironment_mode = 'separate'", {"tests/Dockerfile": "FROM x"}, ["tests/Dockerfile"]),
        ("artifacts = ['/app/../etc']", {}, ["source", "`..`"]),
        ("artifacts = [3]", {}, ["artifacts"]),
        ("artifacts = [{source = '/app', destination = '/etc/x'}]", {}, ["destination", "relative"]),
        ("artifacts = [{source = '/app', destination = 'manifest.json'}]", {}, ["manifest.json"]),
        ("artifacts = [{source = '/db', service = 'db'}]", {}, ["another container"]),
        ("", {"environment/docker-compose.yaml": "services: {}"}, ["docker-compose.yaml", "several containers"]),
        ("", {"environment/data.csv": "1"}, ["no Dockerfile", "docker_image"]),
        ("", {"trajectory.json": "{}"}, ["trajectory.json", "history"]),
        ("[metadata]\nreward_weights = {a = 'x'}", {}, ["reward_weights"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    load: Load, tmp_path: Path, toml: str, files: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(TaskError) as caught:
        load(toml, files)
        load_tasks(tmp_path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "a-task" in message


def test_a_finished_image_needs_no_dockerfile_and_keeps_the_files_beside_it(load: Load, tmp_path: Path) -> None:
    task = load("[environment]\ndocker_image = 'acme/base:1'", {"environment/data.csv": "1"})
    assert (task.box.image, task.box.build_dir) == ("acme/base:1", tmp_path / "a-task" / "environment")


@pytest.mark.parametrize(
    ("toml", "files", "code"),
    [
        ("colour = 'red'", DOCKERFILE, "unknown_field: `colour`"),
        ("[environment]\nmemory_gb = 2", DOCKERFILE, "unknown_field: `environment.memory_gb`"),
        (
            "[environment.healthcheck]\ncommand = 'x'\nretry = 2",
            DOCKERFILE,
            "unknown_field: `environment.healthcheck.r",
        ),
        ("[environment]\nskills_dir = '/skills'", DOCKERFILE, "skills_ignored:"),
        ("", {}, "no_environment:"),
        ("", {**DOCKERFILE, "solution/readme.md": "x"}, "no_solution:"),
        ("", {**DOCKERFILE, "tests/.harborignore": "*.pyc"}, "ignore_rules:"),
    ],
)
def test_what_has_no_effect_is_a_finding(load: Load, toml: str, files: dict[str, str], code: str) -> None:
    findings = load(toml, files).findings
    assert len(findings) == 1 and findings[0].startswith(code), findings


@pytest.mark.parametrize("part", ["environment", "tests", "solution"])
@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside", "../instruction.md"])
def test_a_link_that_leaves_its_folder_is_found_before_a_run(
    load: Load, tmp_path: Path, part: str, target: str
) -> None:
    folder = load("", {**DOCKERFILE, "solution/solve.sh": "true"}).path
    (folder / part / "inside").symlink_to("test.sh" if part == "tests" else ".")
    load_task(folder)
    (folder / part / "sly").symlink_to(target)
    with pytest.raises(TaskError, match=rf"{part}/sly is a link that leaves {part}/"):
        load_task(folder)


def test_a_broken_task_does_not_hide_the_others(load: Load, tmp_path: Path) -> None:
    load("", DOCKERFILE)
    (tmp_path / "b-task" / "tests").mkdir(parents=True)
    (tmp_path / "b-task" / "task.toml").write_text("[environment]\ngpus = 8")
    found = find_tasks(tmp_path)
    assert [(entry.name, entry.task is not None, entry.problem is not None) for entry in found] == [
        ("a-task", True, False),
        ("b-task", False, True),
    ]


def test_a_jsonl_task_may_ask_for_a_box_too(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        '{"name": "a", "instruction": "x", "verify": "true || true", "solution": "echo 1 > x", "image": "acme/base:1",'
        ' "environment_env": {"A": "b"}, "workdir": "/srv", "user": "me", "cpus": 2, "memory_mb": 512,'
        ' "storage_mb": 64, "network_mode": "public"}\n'
        '{"name": "b", "instruction": "x", "verify": "true || true", "gpus": 1}\n'
    )
    first, second = load_tasks(tmp_path / "tasks.jsonl")
    assert first.box == BoxSpec(
        "a",
        image="acme/base:1",
        env={"A": "b"},
        workdir="/srv",
        user="me",
        limits=Limits(cpus=2, memory_mb=512, disk_mb=64),
        network=Network(NetworkMode.PUBLIC),
    )
    assert (first.solution_script, first.verifier_network) == ("echo 1 > x", Network(NetworkMode.PUBLIC))
    assert second.box == BoxSpec("b")
    assert second.findings == ("unknown_field: `gpus` is not a field of a task and is ignored",)
