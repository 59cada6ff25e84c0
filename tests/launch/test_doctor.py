"""The preflight: what would end a run in its first minutes is found, named, and comes with what mends it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness_trainer.cli import main
from harness_trainer.config import RunConfig
from harness_trainer.doctor import check_run, containers, fitting, machine, parts, secrets, sources
from harness_trainer.engine.config import EngineEnvironment
from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.rollouts.on_ray import precheck
from harness_trainer.supervision.remote import PARTS

NASTY = [
    b"pa$$word ${HOME} $(id)",
    b"with # hash and 'quotes' and \"double\" and `ticks`",
    b"two\nlines\n",
    b"\\n is not a newline %s {x}",
    "schlüssel 🔑".encode(),
    b"\xff\xfe not utf-8",
    b" spaces around ",
]


def by_name(checks):
    return {check.name: check for check in checks}


def model_folder(folder: Path, num_parameters: int) -> Path:
    """A model of that many parameters that takes no disk."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    entry = {"w": {"dtype": "F32", "shape": [num_parameters], "data_offsets": [0, 4 * num_parameters]}}
    header = json.dumps(entry).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * num_parameters)
    return folder


# -- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", NASTY)
def test_a_secret_arrives_byte_for_byte_also_in_a_child(tmp_path, monkeypatch, value):
    monkeypatch.setenv("MY_SECRET", "another")
    (tmp_path / "MY_SECRET").write_bytes(value)
    (tmp_path / "not-a-variable").write_bytes(b"x")
    (tmp_path / "EMPTY").touch()
    assert secrets.take_over(tmp_path) == ["MY_SECRET"]
    code = "import os, sys; sys.stdout.buffer.write(os.environb[b'MY_SECRET'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == value


def test_an_editors_newline_after_a_key_is_taken_off_and_nothing_else_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("PASSPHRASE", "")
    for name in ("HF_TOKEN", "PASSPHRASE"):
        (tmp_path / name).write_bytes(b"hf_abc\r\n")
    secrets.take_over(tmp_path)
    assert (os.environ["HF_TOKEN"], os.environ["PASSPHRASE"]) == ("hf_abc", "hf_abc\r\n")


def test_a_secret_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "BINARY").write_bytes(b"a\0b")
    with pytest.raises(ConfigError, match="BINARY has a zero byte"):
        secrets.take_over(tmp_path)
    (tmp_path / "BINARY").unlink()
    (tmp_path / "GONE").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SetupError, match="GONE cannot be read"):
        secrets.take_over(tmp_path)
    assert secrets.take_over(tmp_path / "no-folder") == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hf_good", None),
        ("'hf_quoted'", "in quotes"),
        ('"hf_quoted"', "in quotes"),
        ("hf_cut # comment", None),
        (" hf_space", "white space"),
        ("hf_line\nhf_line", "line end"),
        ("hf_cr\r", "white space"),
        ("\ufeffhf_bom", "byte order mark"),
        ("${HF_TOKEN}", "text of a setting"),
        ("HF_TOKEN=hf_x", "text of a setting"),
        ("hf_ünicode", "no header can carry"),
        ("sk-other", "does not begin with hf_"),
    ],
)
def test_a_key_that_something_spoiled_is_recognised_by_its_looks_and_never_shown(value, problem):
    found = secrets.spoiled("HF_TOKEN", value)
    assert (found is None) == (problem is None)
    if found is not None:
        assert problem in found and "hf_" not in found.replace("begin with hf_", "")


def test_what_spoils_secrets_on_their_way_is_noticed_by_a_file_of_known_bytes(tmp_path):
    canary = Path(secrets.__file__).parents[2] / "docker" / "secrets" / "canary"
    assert canary.read_bytes() == secrets.CANARY, "the file in the repository and the one that is expected"
    (check,) = secrets.check(RunConfig(), {}, tmp_path_with(tmp_path, secrets.CANARY))
    assert check.ok
    (check,) = secrets.check(RunConfig(), {}, tmp_path_with(tmp_path, secrets.CANARY.replace(b"\n", b"\r\n")))
    assert not check.ok and check.required and "canary" in check.fix


def tmp_path_with(folder: Path, content: bytes) -> Path:
    (folder / secrets.CANARY_FILE).write_bytes(content)
    return folder


def test_a_key_that_the_run_needs_and_that_is_missing_is_named(tmp_path):
    config = RunConfig.model_validate({"sandbox": "e2b", "learner": {"report_to": ["wandb"]}})
    missing = [check.name for check in secrets.check(config, {"E2B_API_KEY": ""}, tmp_path)]
    assert missing == ["key E2B_API_KEY", "key WANDB_API_KEY"]
    assert not list(secrets.check(config, {"E2B_API_KEY": "e2b_1", "WANDB_API_KEY": "1"}, tmp_path))


# -- the machine --------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_fit_is_refused_and_one_that_can_is_not(tmp_path):
    config = RunConfig.model_validate({"learner": {"device": "cpu"}})
    small = fitting.fits(config, model_folder(tmp_path / "small", 1000))
    assert small.ok and small.required
    large = fitting.fits(config, model_folder(tmp_path / "large", 10**12))
    assert not large.ok and "at least 12000.0 GB" in large.found and "harness-trainer plan" in large.fix
    unknown = fitting.fits(RunConfig(model="owner/name"), fitting.local_folder(RunConfig(model="owner/name")))
    assert unknown.ok and not unknown.required and "not known" in unknown.found
    (tmp_path / "small" / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert not fitting.fits(config, tmp_path / "small").ok


def test_a_disk_that_the_checkpoints_would_fill_is_named(tmp_path):
    run_dir = tmp_path / "runs" / "not-there-yet"
    config, huge = RunConfig(), model_folder(tmp_path / "huge", 10**12)
    full = machine.disk(run_dir, fitting.kept(config, huge, run_dir))
    assert not full.ok and full.required and "docker system df" in full.fix
    assert not machine.shared_memory(fitting.sent(config, huge)).ok
    assert machine.disk(tmp_path, None).ok


@pytest.mark.parametrize(
    ("learner", "kept", "sent"),
    [
        ({}, 4 + 3 * 12, 4),  # the model, and two checkpoints beside the one that is written; whatever the base's dtype
        ({"save_total_limit": 1, "optimizer": "sgd"}, 4 + 2 * 4, 4),
        ({"max_steps": 10, "save_total_limit": None}, 4 + 12, 4),
        ({"lora": {"rank": 8}, "dtype": "bfloat16"}, 2, 2),
        ({"lora": {"rank": 8, "merge": False}}, 0, 4),
        ({"lora": {"rank": 8}, "weight_sync": {"type": "lora"}}, 4, 0),
    ],
)
def test_what_a_run_keeps_and_sends_is_counted_by_parameters(tmp_path, learner, kept, sent):
    config, model = RunConfig.model_validate({"learner": learner}), model_folder(tmp_path / "model", 1000)
    assert fitting.kept(config, model, tmp_path / "run") == kept * 1000
    assert fitting.sent(config, model) == sent * 1000
    assert fitting.kept(config, None, tmp_path) is None and fitting.sent(config, None) is None


def test_checkpoints_that_are_there_need_no_more_room(tmp_path):
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
    assert fitting.kept(RunConfig(), model_folder(tmp_path / "model", 1000), tmp_path) == (4 + 12) * 1000


def test_a_port_that_is_taken_is_named_with_the_flag_that_frees_the_run_of_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (check,) = parts.ports(RunConfig.model_validate({"gateway": {"port": port}}))
    assert not check.ok and check.name == f"port {port} for the gateway" and "--gateway.port 0" in check.fix
    assert list(parts.ports(RunConfig())) == [], "any free one is found by itself"


def test_the_ports_of_every_replica_are_looked_at():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        run = RunConfig.model_validate({"engine": {"replicas": 2, "port": taken - 1}})
        found = [(check.name, check.ok) for check in parts.ports(run)]
    assert [name for name, _ in found] == [f"port {taken - 1} for the engine", f"port {taken} for the engine"]
    assert not found[1][1]


def test_replicas_without_a_gpu_each_are_named(monkeypatch, tmp_path):
    kind = EngineEnvironment(tmp_path, "cuda")
    monkeypatch.setattr(parts, "find_environment", lambda config: kind)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check = parts.engine(RunConfig.model_validate({"engine": {"replicas": 2}}))
    assert not check.ok and "want 2 GPUs and the learner 1, and 2 are visible" in check.fix
    assert parts.engine(RunConfig.model_validate({"engine": {"replicas": 2}, "learner": {"device": "cpu"}})).ok
    monkeypatch.setenv(PARTS, str(tmp_path))
    check = parts.engine(RunConfig.model_validate({"engine": {"replicas": 2}}))
    assert not check.ok and "leave it at 1 there" in check.fix


def test_an_engine_that_would_find_no_compiler_at_its_first_reply_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    python = Path(sys.executable)
    assert parts._missing_for_cpu(python) is not None
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert parts._missing_for_cpu(python) is None or "libnuma" in parts._missing_for_cpu(python)[0]


def test_an_engine_whose_python_has_no_headers_to_compile_with_is_named(monkeypatch, tmp_path):
    """As Debian's is without python3-dev: the first reply would fail at `#include <Python.h>`."""
    monkeypatch.setattr(parts.ctypes, "CDLL", lambda name: None)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("CXX", sys.executable)
    for answer, expected in (("False", "Python's headers"), ("True", None)):
        python = tmp_path / answer
        python.write_text(f"#!/bin/sh\necho {answer}\n")
        python.chmod(0o755)
        missing = parts._missing_for_cpu(python)
        assert (missing and missing[0]) == expected


def test_a_container_of_the_stack_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(PARTS, str(tmp_path))
    monkeypatch.setattr(parts, "_ANSWER_S", 0.1)
    check = parts.engine(RunConfig())
    assert not check.ok and "docker compose logs engine" in check.fix
    assert [c.name for c in parts.gateway()] == ["container of the gateway"]


# -- Docker -------------------------------------------------------------------------------------------------------


def test_no_engine_a_socket_nobody_listens_at_and_a_socket_that_may_not_be_used_are_told_apart(monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="ht"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/none.sock")
    (check,) = containers.engine(wanted=True)
    assert not check.ok and check.required and "start Docker" in check.fix
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/dead.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/dead.sock")
    (check,) = containers.engine(wanted=False)
    assert not check.ok and not check.required and "nobody listens there" in check.found
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("architecture", "kernel", "ok"),
    [("amd64", "x86_64", True), ("arm64", "aarch64", True), ("arm64", "x86_64", False), (None, "x86_64", True)],
)
def test_an_image_of_another_architecture_is_named(architecture, kernel, ok):
    check = containers.image("python:3.12-slim", architecture, kernel)
    assert check.ok is ok
    assert ok or "docker pull --platform linux/amd64 python:3.12-slim" in check.fix


def test_an_engine_without_the_gpu_runtime_is_named_where_there_is_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert containers.gpu_runtime({"Runtimes": {}}) == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    (check,) = containers.gpu_runtime({"Runtimes": {"runc": {}}})
    assert not check.ok and "nvidia-ctk" in check.fix
    (check,) = containers.gpu_runtime({"Runtimes": {"nvidia": {}}})
    assert check.ok


def test_the_real_engine_passes(docker_engine, docker_base_image, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    settings = {"type": "docker", "image": docker_base_image, "relay_base": docker_base_image}
    checks = containers.engine(wanted=True, config=RunConfig.model_validate({"sandbox": settings}))
    assert [check.ok for check in checks] == [True, True], checks


# -- where rollouts come from ----------------------------------------------------------------------------------------


def serving():
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken, f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_every_source_is_looked_at_and_every_fault_is_named_with_its_source(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "?"}) + "\n")
    (tmp_path / "game.py").touch()
    there, url = serving()
    gone, silent = serving()
    gone.close()
    with there:
        config = RunConfig.model_validate(
            {
                "sources": [
                    {"name": "good", "tasks": "examples", "harness": "pyagent:2,opencode"},
                    {"name": "hub", "tasks": "hf:me/tasks", "harness": "pyagent"},
                    {"name": "bad", "tasks": str(tmp_path / "none"), "harness": "no-such-agent"},
                    {"name": "game", "env": f"class:{tmp_path}/game.py:Game", "tasks": str(rows)},
                    {"name": "lost", "env": "loop:no_such_package.module:Loop", "tasks": str(tmp_path / "game.py")},
                    {"name": "echo", "env": f"openenv:{url}", "tasks": str(rows)},
                    {
                        "name": "dead",
                        "env": {"type": "openenv-harbor", "url": silent, "token_env": "NOT_SET_ANYWHERE"},
                    },
                    {"name": "shop", "tasks": "ors:me/shop"},
                ]
            }
        )
        checks = by_name(sources.check(config, {}))
    wrong = sorted(name for name, check in checks.items() if check.required and not check.ok)
    assert [name for name in wrong if "OpenReward's SDK" not in name] == [
        "source bad: agents",
        "source bad: tasks",
        f"source dead: server {silent}",
        "source dead: token NOT_SET_ANYWHERE",
        "source lost: no_such_package.module:Loop",
        "source lost: rows",
        "source shop: keys and secrets",
    ]
    assert all(checks[name].fix for name in wrong)
    assert "OPENREWARD_API_KEY" in checks["source shop: keys and secrets"].fix
    assert "on the Hub" in checks["source hub: tasks"].found
    assert checks["source good: agents"].found == "pyagent, opencode"
    assert "game" not in sys.modules, "nobody's code is run"


def test_a_run_of_environments_needs_neither_docker_nor_a_sandboxs_key(tmp_path):
    game = {"name": "game", "env": "class:game.py:Game", "tasks": "rows.jsonl"}
    games = RunConfig.model_validate({"sources": [game], "sandbox": "e2b"})
    assert not list(secrets.check(games, {}, tmp_path)) and not sources.needs_docker(games)
    assert "sandboxes' way to the gateway" not in by_name(sources.check(games, {}))
    both = RunConfig.model_validate({"sources": [game, {"name": "code", "tasks": "examples"}], "sandbox": "e2b"})
    assert [check.name for check in secrets.check(both, {}, tmp_path)] == ["key E2B_API_KEY"]
    way = by_name(sources.check(both, {}))["sandboxes' way to the gateway"]
    assert not way.ok and "--gateway.expose cloudflared" in way.fix
    docker = {"type": "openenv", "target": "docker:image"}
    served = RunConfig.model_validate({"sources": [{"name": "echo", "env": docker, "tasks": "rows.jsonl"}]})
    assert sources.needs_docker(served)
    assert sources.needs_docker(RunConfig(sandbox="docker")) and not sources.needs_docker(RunConfig())


def test_rollouts_on_nodes_need_a_cluster_and_no_docker_engine_of_this_machine(monkeypatch):
    monkeypatch.setattr(precheck.importlib.util, "find_spec", lambda name: None)  # a cluster takes seconds to refuse
    on_ray = RunConfig(sandbox="docker", rollouts={"executor": "ray"})
    check = by_name(sources.check(on_ray, {}))["Ray cluster"]
    assert not check.ok and check.fix.endswith("pip install 'harness-trainer[ray]'")
    assert not sources.needs_docker(on_ray) and "Ray cluster" not in by_name(sources.check(RunConfig(), {}))


def test_an_engine_that_serves_already_takes_the_place_of_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HARNESS_TRAINER_ENGINE_PYTHON", str(tmp_path / "none"))
    there, url = serving()
    with there:
        argv = ["rollout", "--run-dir", str(tmp_path / "run"), "--harness", "pyagent", "--engine-url", url]
        assert main(["doctor", "--json", *argv]) == 0, capsys.readouterr()
    names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert f"server {url}" in names and not any("vLLM" in name for name in names)
    assert main(["doctor", "--before-run", *argv]) == 3
    assert "start it, or correct its address" in capsys.readouterr().err


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://h:99999", "http://[::1", "localhost:8000", "h"])
def test_what_is_no_address_of_a_server_is_said_to_be_none(url):
    check = sources.listens(url)
    assert not check.ok and check.found.startswith("no address") and "http://HOST:PORT" in check.fix


def test_a_gpu_that_the_profile_promises_and_that_is_not_there_is_required(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = by_name(check_run(RunConfig(), tmp_path, {machine.PROFILE: "gpu"}))
    assert checks["GPU"].required and not checks["GPU"].ok and "COMPOSE_PROFILES=cpu" in checks["GPU"].fix
    assert "GPU" not in by_name(check_run(RunConfig(), tmp_path, {}))


def test_the_command_says_it_in_json_and_by_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    run = ["train", "--run-dir", str(tmp_path / "run"), "--sandbox", "docker", "--plain"]
    assert main(["doctor", "--json", *run]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert [check["name"] for check in said["checks"] if check["required"] and not check["ok"]] == [
        "Docker engine, for --sandbox docker"
    ]
    assert main(["doctor", "--before-run", *run]) == 3
    told = capsys.readouterr()
    assert told.out == "" and "start Docker" in told.err
    assert not (tmp_path / "run").exists(), "it only looks"
    assert main(["doctor", "train", "--sandbox", "no-such-box"]) == 2
    with pytest.raises(SystemExit):
        main(["doctor", "--sandbox", "docker"])
