"""The real vLLM ends with its owner, and says why when it cannot load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo, describe_model
from harness_trainer.errors import EngineFailed

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine_environment")]

OWNER = """
import sys
from pathlib import Path
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import describe_model
folder = Path(sys.argv[1])
engine = Engine(
    EngineConfig(kv_cache_gib=0.25, cpu_threads=1),
    model=describe_model(folder / "model", "tiny"),
    log_path=folder / "engine.log",
    registry=folder / "owned",
)
engine.start(lambda phase: print(phase, flush=True))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return make_tiny_model(tmp_path_factory.mktemp("life") / "model")


def marked(owned_id: str) -> list[str]:
    """Command lines of the processes that carry the mark of the owned thing."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if owned_id.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_the_engine_and_its_core_die_with_a_killed_owner(model: ModelInfo) -> None:
    folder = model.path.parent
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.strip() in ("loading weights", "preparing weights", "warming up", "opening the port"):
            break
    (record,) = (folder / "owned").glob("engine-*.json")  # beside that of its temp folder
    assert len(marked(record.stem)) >= 3  # supervisor, API server, engine core
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while marked(record.stem) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(record.stem) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["FooForCausalLM"]}, r"FooForCausalLM"),
        ({"hidden_size": 256}, r"(?i)size|shape"),
    ],
    ids=["unknown-architecture", "weights-of-another-size"],
)
def test_a_model_that_cannot_load_is_an_error_with_vllms_reason(
    model: ModelInfo, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.path.iterdir():
        (broken / file.name).symlink_to(file)
    config = json.loads((model.path / "config.json").read_text())
    (broken / "config.json").unlink()
    (broken / "config.json").write_text(json.dumps({**config, **changes}))
    info = describe_model(broken, "broken")
    engine = Engine(
        EngineConfig(kv_cache_gib=0.25, cpu_threads=1),
        model=info,
        log_path=tmp_path / "log",
        registry=tmp_path / "owned",
    )
    with pytest.raises(EngineFailed, match=reason) as caught:
        engine.start()
    print(f"\n{caught.value}")
    assert "\n" not in str(caught.value)
    assert not engine.alive()
    assert list((tmp_path / "owned").glob("*.json")) == []
