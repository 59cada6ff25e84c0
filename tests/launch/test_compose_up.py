"""The whole stack in a real Docker engine: `compose up` trains a step, ends by itself, and `up` again goes on.

The images are built from their own files on the local base. Their Python packages are not installed once more: this
checkout's own are mounted where the images have theirs.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from pathlib import Path

import pytest
import yaml

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from tests.engine.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
# Any text scores; what a random model says differs from reply to reply.
VERIFY = (
    "python3 -c \"t = open('/logs/agent/final_message.txt').read(); "
    'print(sum(c.isalpha() for c in t) / max(1, len(t)))" > /logs/verifier/reward.txt'
)
FLAGS = (
    "--rollouts.group-size 2 --rollouts.max-concurrent 2 --rollouts.max-tokens 12 --learner.groups-per-step 1 "
    "--learner.learning-rate 0.01 --learner.token-budget 2048 --learner.save-steps 1 "
    "--engine.max-model-len 512 --engine.kv-cache-gib 0.25 --sandbox.image {base} --sandbox.relay-base {base}"
)


@pytest.fixture(scope="module")
def compose() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no Compose: apt-get install docker-compose")


@pytest.fixture(scope="module")
def base(docker_engine, docker_base_image) -> str:
    """An image whose Python is the one that this checkout's packages were installed for."""
    import docker

    client = docker.DockerClient(base_url=docker_engine)
    wanted = f"Python {VERSION}."
    try:
        found = [tag for image in client.images.list() for tag in image.tags if tag in IMAGES]
        for name in sorted(found, key=IMAGES.index):
            said = client.containers.run(name, ["python3", "-V"], remove=True, network_mode="none").decode()
            if said.startswith(wanted):
                return name
    finally:
        client.close()
    pytest.skip(f"the engine has no image with {wanted.rstrip('.')} of {', '.join(IMAGES)}")


# What the trainer's entry does before every command, and then a look.
SHOW_SECRET = (
    "import os, sys; from harness_trainer.doctor.secrets import SECRETS, take_over; take_over(SECRETS); "
    "sys.stdout.write(ascii(os.environ['HF_TOKEN']))"
)
VERSION = "{}.{}".format(*sys.version_info)
IMAGES = ("ht-base:bookworm", "python:3.11-slim", "python:3.12-slim")


class Stack:
    """One stack of its own name in the engine."""

    def __init__(self, compose: list[str], folder: Path, docker_engine: str, settings: dict[str, str]) -> None:
        import docker

        self.name = settings["COMPOSE_PROJECT_NAME"]
        self.client = docker.DockerClient(base_url=docker_engine)
        (folder / "none.env").touch()  # a person's .env is not this test's
        files = ["-f", str(ROOT / "compose.yaml"), "-f", str(folder / "packages.yaml")]
        self._command = [*compose, "--project-directory", str(ROOT), "--env-file", str(folder / "none.env"), *files]
        self._env = {**os.environ, "DOCKER_HOST": docker_engine, **settings}

    def run(self, *arguments: str, timeout_s: float, **settings: str) -> str:
        argv = [*self._command, *arguments]
        done = subprocess.run(
            argv, env={**self._env, **settings}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def container(self, service: str):
        wanted = {"label": [f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}"]}
        (found,) = self.client.containers.list(all=True, filters=wanted)
        return found

    def read(self, path: str) -> str:
        """A file of the trainer's, also when it has ended."""
        chunks, _ = self.container("trainer-cpu").get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            return tar.extractfile(tar.next()).read().decode()

    def close(self) -> None:
        try:
            self.run("down", "-v", "--rmi", "all", timeout_s=120)
        finally:
            self.client.close()


@pytest.fixture
def stack(compose, base, docker_engine, tmp_path):
    try:
        engine = find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    (tmp_path / "input").mkdir()
    make_tiny_model(tmp_path / "input" / "model", family="llama", tied=True)
    lines = [{"name": name, "instruction": f"Say {name}.", "verify": VERIFY} for name in ("sun", "moon")]
    (tmp_path / "input" / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (tmp_path / "input").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    secret = tmp_path / "key"
    secret.write_bytes(b"hf_$dollar#hash'quote\"double\\n\n")
    secret.chmod(0o644)
    ours = f"{sysconfig.get_path('purelib')}:/opt/venv/packages:ro"
    asked = [str(engine.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    theirs = f"{subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}:/opt/venv/packages:ro"
    # The engine's own image has one library more than the engine's environment here.
    more = f"{sysconfig.get_path('purelib')}/orjson:/opt/venv/lib/python{VERSION}/site-packages/orjson:ro"
    mounts = {name: [ours] for name in ("gateway", "trainer-cpu", "socket-proxy")} | {"engine-cpu": [theirs, more]}
    services = {name: {"volumes": volumes} for name, volumes in mounts.items()}
    (tmp_path / "packages.yaml").write_text(yaml.safe_dump({"services": services}))
    name = f"ht-test-{uuid.uuid4().hex[:8]}"
    settings = {
        "COMPOSE_PROJECT_NAME": name,
        "COMPOSE_PROFILES": "cpu",
        "BASE_IMAGE": base,
        "NODE_IMAGE": base,
        "INSTALL_PACKAGES": "no",
        "VERSION": name,
        "DOCKER_SOCKET": docker_engine.removeprefix("unix://"),
        "INPUT": str(tmp_path / "input"),
        "RUN": name,
        "MODEL": "/input/model",
        "TASKS": "/input/tasks.jsonl",
        "HARNESS": "pyagent-chat",
        "HF_TOKEN_FILE": str(secret),
        "WEIGHTS_SIZE": "256m",
    }
    stack = Stack(compose, tmp_path, docker_engine, settings)
    try:
        yield stack
    finally:
        stack.close()


def test_up_trains_a_step_ends_by_itself_and_up_again_goes_on(stack, base):
    if not stack.client.api.base_url.startswith("http+docker://"):
        pytest.skip("the stack mounts this machine's files: it needs an engine on this machine")
    flags = FLAGS.format(base=base)
    stack.run("build", timeout_s=600)
    stack.run("up", "--no-color", timeout_s=900, TRAIN_FLAGS=f"{flags} --learner.max-steps 1")
    trainer = stack.container("trainer-cpu")
    log = trainer.logs().decode()
    assert trainer.attrs["State"]["ExitCode"] == 0, log
    assert "run folder" in log and "docker compose" in log, "it says where to look"
    metrics = f"/runs/{stack.name}/metrics.jsonl"
    (step,) = [json.loads(line) for line in stack.read(metrics).splitlines()]
    assert step["step"] == 1

    stack.run("up", "--no-color", timeout_s=900, TRAIN_FLAGS=f"{flags} --learner.max-steps 2")
    steps = [json.loads(line)["step"] for line in stack.read(metrics).splitlines()]
    assert steps == [1, 2], stack.container("trainer-cpu").logs().decode()
    for service in ("gateway", "engine-cpu", "socket-proxy"):
        assert stack.container(service).attrs["State"]["ExitCode"] == 0
    left = stack.client.containers.list(all=True, filters={"label": f"harness-trainer.run={stack.name}"})
    assert left == [], "no sandbox outlives the run"
    python = ["run", "--rm", "--no-deps", "--entrypoint", "python", "-T", "trainer-cpu", "-c", SHOW_SECRET]
    said = stack.run(*python, timeout_s=60)
    assert ascii("hf_$dollar#hash'quote\"double\\n") in said
