"""What a rollout's sandbox is asked to be, and what the agent's placeholders become inside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from capture_proxy.types import Session, SessionPolicy
from harness_trainer.errors import TaskError
from harness_trainer.harnesses import base as harness_base
from harness_trainer.harnesses import load_harness
from harness_trainer.rollouts.boxes import DEADLINE_SLACK_S, Boxes
from harness_trainer.rollouts.budget import Limits as Times
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.tasks import Task
from sandboxes.base import Access, BoxSpec, Endpoint, Limits, Mount, Network, NetworkMode, Proxy, SandboxError
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig

PROGRAMS = Path("/cache/npm-1/node_modules/.bin")
SESSION = Session("r", "the-token", SessionPolicy(), {})
TASK = Task("t", Path("/tasks/t"), "Do it.", verify_script="exit 0")
NOWHERE = Access()


class Inside:
    """A started sandbox as far as placeholders are concerned."""

    workdir = "/work dir"
    gateway_url: str | None = "http://127.0.0.1:18101"
    proxy_url: str | None = "http://127.0.0.1:18102"

    def resolve(self, path):
        return path


def boxes(sandbox, harness="pyagent", access=NOWHERE, **settings):
    spec = RunnerSpec(
        config=RolloutConfig(**settings),
        sandbox=sandbox,
        tasks="-",
        harness=harness,
        harness_bin=PROGRAMS,
        store=Path("store"),
        artifacts=Path("artifacts"),
        registry=Path("owned"),
        run_id="r",
        model="m",
        context=100,
        access=access,
        admin_url="http://127.0.0.1:1",
        max_open_groups=1,
        num_groups=1,
    )
    return Boxes(spec, load_harness(harness), access)


def test_every_rollout_of_a_task_asks_for_the_same_and_two_tasks_never_do():
    one = boxes(DockerConfig())
    assert one.spec_of(TASK) == one.spec_of(replace(TASK)) == boxes(DockerConfig()).spec_of(TASK)
    assert one.spec_of(TASK) != one.spec_of(replace(TASK, name="u", box=BoxSpec("u")))


def test_a_sandbox_outlives_its_rollout_by_a_little_and_a_tighter_wish_of_the_task_wins():
    made = boxes(DockerConfig(), timeout_s=50)
    total_s = Times.of(made.spec.config, TASK).total_s
    assert made.spec_of(TASK).limits.deadline_s == total_s + DEADLINE_SLACK_S
    wish = replace(TASK, name="u", box=BoxSpec("u", limits=Limits(deadline_s=7, memory_mb=9)))
    assert made.spec_of(wish).limits == Limits(deadline_s=7, memory_mb=9)


def test_an_installed_agent_is_mounted_where_every_user_may_read_it_and_called_there():
    made = boxes(DockerConfig(), "opencode")
    assert made.spec_of(TASK).mounts == (Mount(PROGRAMS.parent, "/opt/harness-trainer/node_modules"),)
    values = made.values(TASK, SESSION, Inside())
    argv = harness_base.render(made.harness.argv, values)
    assert argv[0] == "/opt/harness-trainer/node_modules/.bin/opencode"


def test_the_shipped_agent_runs_on_the_images_own_python():
    made = boxes(DockerConfig())
    (mount,) = made.spec_of(TASK).mounts
    values = made.values(TASK, SESSION, Inside())
    argv = harness_base.render(made.harness.argv, values)
    assert argv[0] == "python3" and argv[2] == f"{mount.target}/pyagent.py"
    assert (mount.source / "pyagent.py").is_file()
    assert values["base_url"] == "http://127.0.0.1:18101" and values["app"] == "/work dir"


def test_the_local_sandbox_has_them_at_their_own_paths():
    made = boxes(LocalConfig(), "opencode")
    assert made.spec_of(TASK).mounts == (Mount(PROGRAMS.parent, str(PROGRAMS.parent)),)
    assert made.values(TASK, SESSION, Inside())["bin"] == str(PROGRAMS)


def test_mounts_of_the_task_itself_stay():
    own = replace(TASK, box=BoxSpec("t", mounts=(Mount(Path("/data"), "/data"),)))
    assert Mount(Path("/data"), "/data") in boxes(DockerConfig()).spec_of(own).mounts


def test_a_variable_of_the_tasks_environment_is_filled_in_and_missed_by_name(monkeypatch):
    wants = replace(TASK, box=BoxSpec("t", env={"KEY": "${A_KEY}", "MODE": "${A_MODE:-fast}"}))
    with pytest.raises(TaskError, match="A_KEY"):
        boxes(DockerConfig()).spec_of(wants)
    monkeypatch.setenv("A_KEY", "1")
    assert boxes(DockerConfig()).spec_of(wants).env == {"KEY": "1", "MODE": "fast"}


def test_without_a_gateway_in_reach_no_agent_is_started():
    cut_off = Inside()
    cut_off.gateway_url = None
    with pytest.raises(SandboxError, match="gateway"):
        boxes(DockerConfig()).values(TASK, SESSION, cut_off)


def test_the_proxys_variables_and_certificates_are_given_to_the_tasks_whose_list_it_holds_and_to_no_others():
    network = Network(NetworkMode.ALLOWLIST, ("pypi.example",))
    proxy = Proxy(Endpoint(url="http://127.0.0.1:9"), ("PyPI.example",), Path("/run/public"))
    made = boxes(DockerConfig(), access=Access(proxies=(proxy,)))
    listed = replace(TASK, box=BoxSpec("t", network=network))
    assert Mount(Path("/run/public"), "/opt/harness-trainer/public") in made.spec_of(listed).mounts
    env = made.network_env(listed, SESSION, Inside())
    assert env["HTTPS_PROXY"] == "http://x:the-token@127.0.0.1:18102"
    assert env["SSL_CERT_FILE"] == "/opt/harness-trainer/public/ca-bundle.pem"
    for other in (
        replace(TASK, name="v", box=BoxSpec("v")),
        replace(TASK, name="u", box=BoxSpec("u", network=Network(NetworkMode.PUBLIC))),
    ):
        assert made.network_env(other, SESSION, Inside()) == {}
        assert len(made.spec_of(other).mounts) == 1
