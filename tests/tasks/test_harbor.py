"""Real Harbor beside us: it reads the same tasks in the same way, and its oracle earns the same rewards in Docker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.rewards.oracle import check_tasks
from harness_trainer.tasks import EXAMPLES, Task, find_tasks, load_task
from sandboxes import open_backend
from sandboxes.base import Access, Network, NetworkMode
from sandboxes.docker import DockerConfig

pytestmark = pytest.mark.harbor

HERE = Path(__file__).parent


def harbor_views(python: str, folders: list[Path]) -> list[dict[str, Any]]:
    argv = [python, str(HERE / "harbor_view.py"), *map(str, folders)]
    views: list[dict[str, Any]] = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return views


def our_view(task: Task) -> dict[str, Any]:
    """The same facts from our side, in Harbor's terms where the two differ on purpose."""
    box, check = task.box, task.box.healthcheck
    return {
        "name": task.name,
        "instruction": task.instruction,
        "agent_timeout_s": task.agent_timeout_s if "timeout_sec" in task.raw.get("agent", {}) else None,
        "agent_user": box.user,
        "agent_network": in_harbors_terms(box.network, NetworkMode.PROXY_ONLY) if asks_for_network(task) else None,
        "verifier_timeout_s": task.verifier_timeout_s,
        "verifier_user": task.verifier_user,
        "verifier_network": task.verifier_network and in_harbors_terms(task.verifier_network, NetworkMode.NONE),
        "verifier_env": task.env_vars,
        "verifier_fresh": task.verifier_fresh,
        "build_timeout_s": box.build_timeout_s,
        "image": box.image,
        "cpus": box.limits.cpus,
        "memory_mb": box.limits.memory_mb,
        "disk_mb": box.limits.disk_mb,
        "env": dict(box.env),
        "workdir": box.workdir,
        "healthcheck": check
        and [
            check.command,
            check.interval_s,
            check.timeout_s,
            check.start_period_s,
            check.start_interval_s,
            check.retries,
        ],
        "artifacts": [[a.source, a.destination, list(a.exclude)] for a in task.artifacts],
        "solution_env": task.solution_env,
        "solution": task.solution_dir is not None,
        "metadata": task.metadata,
    }


def asks_for_network(task: Task) -> bool:
    environment = task.raw.get("environment", {})
    return bool({"network_mode", "allow_internet"} & set(environment)) or "network_mode" in task.raw.get("agent", {})


def in_harbors_terms(network: Network, closed: NetworkMode) -> list[Any]:
    modes = {NetworkMode.PUBLIC: "public", NetworkMode.ALLOWLIST: "allowlist", closed: "no-network"}
    return [modes[network.mode], [host.removesuffix(":*").strip("[]") for host in network.allow]]


def test_harbor_reads_the_example_tasks_as_we_do(harbor_python: str) -> None:
    tasks = [found.task for found in find_tasks("examples") if found.task is not None]
    assert len(tasks) == 11
    assert [our_view(task) for task in tasks] == harbor_views(harbor_python, [task.path for task in tasks])


TOMLS = {
    "empty": "",
    "all": """
version = "1.0"
artifacts = ["/app/out", "report.txt"]
[task]
name = "acme/all"
description = "everything"
[[task.authors]]
name = "A"
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 12.5
user = 1001
network_mode = "allowlist"
allowed_hosts = [" Mirror.Example. ", "*.files.example", "192.0.2.1", "2001:DB8::0:1"]
[verifier]
timeout_sec = 7
user = "judge"
network_mode = "no-network"
environment_mode = "separate"
[verifier.env]
KEY = "${KEY:-k}"
[environment]
build_timeout_sec = 90
docker_image = "acme/base:1"
os = "Linux"
cpus = 1.5
memory_mb = 2048
storage_mb = 4096
gpus = 0
workdir = "/srv/app"
network_mode = "public"
env = { A = "${A:-a}", B = "b" }
[environment.healthcheck]
command = "test -f /ready"
interval_sec = 0.5
timeout_sec = 2
start_period_sec = 10
start_interval_sec = 1
retries = 7
[solution.env]
SEED = "7"
""",
    "older": "[environment]\nmemory = '1.5G'\nstorage = '512m'\nallow_internet = false",
    "internet": "[environment]\nallow_internet = true",
    "newer-wins": "[environment]\nallow_internet = false\nnetwork_mode = 'public'",
    "closed": "[environment]\nnetwork_mode = 'no-network'",
    "listed": "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']",
    "listed-none": "[environment]\nnetwork_mode = 'allowlist'",
    "agent-closed": "[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'no-network'",
    "tests-open": "[environment]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'",
    "check": "[environment.healthcheck]\ncommand = 'true'",
    "kilobytes": "[environment]\nmemory = '2097152K'",
    "unknown": "colour = 'red'\n[environment]\nmemory_gb = 2\n[agent]\nshoe = 43",
    "artifacts": "[[artifacts]]\nsource = '/app'\nexclude = ['*.o']\n[[artifacts]]\nsource = 'r'\ndestination = 'x/r'",
}


def write_task(folder: Path, toml: str) -> Path:
    files = {"task.toml": toml, "instruction.md": "# CANARY x\n\nDo it.\n", "tests/test.sh": "true"}
    for name, text in {**files, "environment/Dockerfile": "FROM python:3.12-slim\n", "solution/solve.sh": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_harbor_reads_every_field_as_we_do(harbor_python: str, tmp_path: Path) -> None:
    folders = [write_task(tmp_path / name, toml) for name, toml in TOMLS.items()]
    for folder, theirs in zip(folders, harbor_views(harbor_python, folders), strict=True):
        assert our_view(load_task(folder)) == theirs, folder.name


REFUSED = [
    "[environment]\nnetwork_mode = 'proxy-only'",
    "[environment]\nallowed_hosts = ['a.example']",
    "[agent]\nallowed_hosts = ['a.example']",
    "[agent]\nnetwork_mode = 'public'\nallowed_hosts = ['a.example']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a.example/']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example:443']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a*.example']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['']",
    "[environment]\ncpus = nan",
    "[environment]\nmemory = '2T'",
    "[environment]\nmemory = '2G'\nmemory_mb = 512",
    "[environment]\nmemory_mb = 0.5",
    "[environment]\nos = 'plan9'",
    "[environment.healthcheck]\nretries = 3",
    "[environment.env]\nA = 1",
    "[verifier]\nenvironment_mode = 'other'",
    "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 2",
    "[verifier]\ntimeout_sec = 'soon'",
    "artifacts = ['/app/../etc']",
    "artifacts = [{source = '/app', destination = '/etc/x'}]",
    "artifacts = [{source = '/app', destination = 'manifest.json'}]",
    "[agent]\nuser = []",
    "[task]\nname = ''",
    "metadata = []",
]


def test_what_harbor_refuses_is_refused_here(harbor_python: str, tmp_path: Path) -> None:
    folders = [write_task(tmp_path / f"{number:02}", toml) for number, toml in enumerate(REFUSED)]
    theirs = harbor_views(harbor_python, folders)
    assert [toml for toml, view in zip(REFUSED, theirs, strict=True) if "error" not in view] == []
    assert [REFUSED[int(found.name)] for found in find_tasks(tmp_path) if found.problem is None] == []


NAMES = ("cheer", "word-list")


@pytest.fixture
def compose(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """How Harbor shall start containers: its `docker` environment, or the same on Debian's docker-compose."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    if subprocess.run(["docker", "image", "inspect", "python:3.12-slim"], capture_output=True, check=False).returncode:
        pytest.skip("the engine has no python:3.12-slim, which the example tasks are built on")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return "docker"
    if shutil.which("docker-compose") is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    return "harbor_compose:ComposeV1Environment"


async def test_harbors_oracle_earns_the_rewards_that_our_check_finds(
    harbor_python: str, compose: str, docker_engine: str, tmp_path: Path
) -> None:
    argv = [harbor_python, "-c", "from harbor.cli.main import app; app()", "run", "-p", str(EXAMPLES)]
    argv += ["-a", "oracle", "-e", compose]
    argv += [part for name in NAMES for part in ("-i", name)]
    argv += ["-o", str(tmp_path / "jobs"), "-n", "2", "-y", "-q"]
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "HOME": str(tmp_path),
        "DOCKER_BUILDKIT": "0",  # an engine without the buildx plugin
        "COMPOSE_DOCKER_CLI_BUILD": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # Harbor's model library would ask the internet otherwise
    }
    ran = await asyncio.to_thread(
        subprocess.run, argv, env=env, capture_output=True, text=True, timeout=480, check=False
    )
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs").glob("*/*/result.json")]
    theirs = {result["task_name"]: (result["verifier_result"] or {}).get("rewards") for result in results}
    assert theirs == {name: {"reward": 1.0} for name in NAMES}, ran.stdout[-2000:] + ran.stderr[-2000:]

    found = [found for found in find_tasks("examples") if found.name in NAMES]
    config = DockerConfig(host=docker_engine)
    async with open_backend(config, run_id="test", registry=tmp_path / "owned", access=Access()) as backend:
        reports = await check_tasks(found, backend, tmp_path / "logs", jobs=2, on_report=lambda _: None)
    assert {report.name: {"reward": report.oracle} for report in reports} == theirs, reports
