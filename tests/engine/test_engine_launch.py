"""Starting and ending an engine, with a stand-in for vLLM that fails as vLLM fails."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness_trainer.engine.config import EngineConfig, EngineEnvironment, build_argv, build_env
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.engine.vllm_plugin import PLUGIN
from harness_trainer.errors import EngineFailed, SetupError

MODEL = ModelInfo(path=Path("/models/tiny"), model_id="tiny", tied=True, max_len=4096)
FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An "interpreter" that is the fake engine whatever it is asked to run."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def engine(python: Path, tmp_path: Path) -> Engine:
    config = EngineConfig(python=python, start_timeout_s=60)
    return Engine(config, model=MODEL, log_path=tmp_path / "logs" / "engine.log", registry=tmp_path / "owned")


def owned_processes(engine: Engine) -> list[int]:
    """Processes that carry the engine's marker, wherever they went."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if engine.process.owned_id.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def test_start_reports_phases_in_order_and_stop_ends_every_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "serve")
    phases: list[str] = []
    url = engine.start(phases.append)
    assert url == engine.base_url
    assert phases[0] == "starting vLLM"
    assert phases[-1] == "opening the port"
    assert engine.alive()
    assert len(owned_processes(engine)) >= 2
    engine.stop()
    engine.stop()
    assert not engine.alive()
    assert owned_processes(engine) == []


def test_in_a_temp_folder_whose_name_is_long_sockets_lie_where_they_always_did(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temp = tmp_path / ("t" * (106 - 37 - len(str(tmp_path)))) if len(str(tmp_path)) < 68 else tmp_path / "t"
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    monkeypatch.setenv("FAKE_VLLM", "serve")
    engine.start()
    assert (temp / "a-socket").exists()
    engine.stop()
    assert [path.name for path in temp.iterdir()] == ["a-socket"]


@pytest.mark.parametrize("play", ["serve", "it dies"])
def test_what_vllm_leaves_in_its_temp_folder_goes_with_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, play: str
) -> None:
    temp = Path(tempfile.mkdtemp(prefix="t"))  # short
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    monkeypatch.setenv("FAKE_VLLM", play)
    if play == "serve":
        engine.start()
        assert [path.name for path in temp.glob("enginetemp-*/*")] == ["a-socket"]
        engine.stop()
    else:
        with pytest.raises(EngineFailed):
            engine.start()
    temp.rmdir()  # or it is not empty
    assert list((tmp_path / "owned").glob("*.json")) == []


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "(EngineCore pid=9) ERROR 11-29 19:43:56 [core.py:1] Traceback (most recent call last):\n"
            "(EngineCore pid=9) ERROR 11-29 19:43:56 [core.py:1] ValueError: No memory for the cache blocks.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "ValueError: No memory for the cache blocks.",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, Model architectures ['Foo'] are not supported for now.",
            "ValidationError: Model architectures ['Foo'] are not supported for now.",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
            "OutOfMemoryError: CUDA out of memory",
        ),
        ("api_server.py: error: unrecognized arguments: --frob", "error: unrecognized arguments: --frob"),
        ("something else entirely", "something else entirely"),
        ("", "no output"),
    ],
)
def test_an_engine_that_dies_while_loading_says_why_in_one_line(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, log: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", log)
    with pytest.raises(EngineFailed) as caught:
        engine.start()
    assert reason in str(caught.value)
    assert str(engine.log_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not engine.alive()


def test_the_log_of_an_earlier_run_explains_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.log_path.parent.mkdir()
    engine.log_path.write_text("ValueError: yesterday's fault\nStarting vLLM server on 80\n")
    monkeypatch.setenv("FAKE_VLLM", "KeyError: today's fault")
    with pytest.raises(EngineFailed, match="today's fault"):
        engine.start()


def test_a_time_out_names_the_phase_and_leaves_nothing(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    config = EngineConfig(python=python, start_timeout_s=3)
    engine = Engine(config, model=MODEL, log_path=tmp_path / "engine.log", registry=tmp_path / "owned")
    with pytest.raises(EngineFailed, match="still preparing weights after 3 s"):
        engine.start()
    assert owned_processes(engine) == []


def test_a_free_port_that_is_taken_meanwhile_is_replaced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "taken")
    monkeypatch.setenv("FAKE_COUNT", str(tmp_path / "count"))
    with engine:
        assert engine.alive()
    assert (tmp_path / "count").read_text() == "xx"


def test_a_taken_port_is_named_before_anything_starts(python: Path, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        engine = Engine(
            EngineConfig(python=python, port=port), model=MODEL, log_path=tmp_path / "log", registry=tmp_path / "owned"
        )
        with pytest.raises(SetupError, match=f"127.0.0.1:{port} .*choose another port"):
            engine.start()
    assert not (tmp_path / "log").exists()


async def test_cancelling_a_start_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    task = asyncio.ensure_future(engine.__aenter__())
    while not (engine.log_path.exists() and "Loading weights took" in engine.log_path.read_text()):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert owned_processes(engine) == []


@pytest.mark.parametrize(
    ("probe", "text"), [("none bare", "has no vLLM"), ("cpu bare", "lacks harness-trainer's vLLM plug-in")]
)
def test_an_unfit_engine_environment_names_the_command(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, probe: str, text: str
) -> None:
    monkeypatch.setenv("FAKE_PROBE", probe)
    with pytest.raises(SetupError, match=f"{text}; run `harness-trainer setup engine`.*`make setup`"):
        engine.start()


def test_a_missing_engine_environment_names_the_command(tmp_path: Path) -> None:
    config = EngineConfig(python=tmp_path / "nowhere")
    with pytest.raises(SetupError, match="run `harness-trainer setup engine`.*`make setup`"):
        Engine(config, model=MODEL, log_path=tmp_path / "log", registry=tmp_path / "owned").start()


def test_every_flag_that_capture_needs_is_there() -> None:
    argv = build_argv(EngineConfig(), MODEL, EngineEnvironment(Path("python"), "cpu"), 8000)
    for flag in ("--enable-auto-tool-choice", "--return-tokens-as-token-ids", "--enable-scale-out", "--enforce-eager"):
        assert flag in argv
    for flag, value in (
        ("--tool-call-parser", "hermes"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--weight-transfer-config", '{"backend": "shm"}'),
        ("--generation-config", "vllm"),
        ("--dtype", "float32"),
    ):
        assert argv[argv.index(flag) + 1] == value


def test_cpu_settings_stay_off_a_gpu() -> None:
    environment = EngineEnvironment(Path("python"), "cuda")
    argv = build_argv(EngineConfig(gpu_memory_utilization=0.4), MODEL, environment, 8000)
    assert "--enforce-eager" not in argv
    assert "--kv-cache-memory-bytes" not in argv
    assert "--distributed-executor-backend" not in argv
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.4"
    assert argv[argv.index("--dtype") + 1] == "auto"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in build_env(EngineConfig(), environment, {})


def test_the_engine_inherits_no_python_path_and_sees_no_hub() -> None:
    env = build_env(EngineConfig(), EngineEnvironment(Path("python"), "cpu"), {"PYTHONPATH": "/x", "HOME": "/h"})
    assert "PYTHONPATH" not in env
    assert env["HOME"] == "/h"
    assert env["HF_HUB_OFFLINE"] == env["VLLM_SERVER_DEV_MODE"] == "1"


def test_what_a_shell_holds_for_another_vllm_does_not_hide_ours() -> None:
    shell = {
        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_CONFIG_PATH": "/mine.json",
        "VLLM_LOGGING_PREFIX": "mine ", "VLLM_LOGGING_COLOR": "1", "VLLM_API_KEY": "key", "VLLM_DP_SIZE": "2",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1", "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_USE_MODELSCOPE": "1",
    }  # fmt: skip
    environment = EngineEnvironment(Path("python"), "cuda")
    env = build_env(EngineConfig(), environment, {**shell, "VLLM_CACHE_ROOT": "/cache", "HOME": "/h"})
    assert not shell.keys() & env.keys() - {"VLLM_LOGGING_COLOR"}
    assert env["VLLM_LOGGING_COLOR"] == "0" and env["VLLM_CACHE_ROOT"] == "/cache" and env["HOME"] == "/h"
    assert "VLLM_PLUGINS" not in env  # all are loaded
    assert build_env(EngineConfig(), environment, {"VLLM_LOGGING_LEVEL": "debug"})["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(("theirs", "all_of_them"), [("", ["harness_trainer_shm"]), ("a,b", ["a", "b", PLUGIN])])
def test_a_persons_choice_of_plugins_has_ours_too(theirs: str, all_of_them: list[str]) -> None:
    env = build_env(EngineConfig(), EngineEnvironment(Path("python"), "cuda"), {"VLLM_PLUGINS": theirs})
    assert env["VLLM_PLUGINS"].split(",") == all_of_them
    (ours,) = entry_points(group="vllm.general_plugins", name=PLUGIN)
    assert ours.module == "harness_trainer.engine.vllm_plugin"
