"""Parts of a run in other containers: a real host in a process of its own, driven as the supervisor drives it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.errors import EngineFailed, SetupError
from harness_trainer.supervision.part_health import check
from harness_trainer.supervision.remote import PARTS, RemoteHost
from harness_trainer.supervision.remote_engine import RemoteEngine

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


class Hosted:
    """A host, and the orders that a test gives it."""

    def __init__(self, folder: Path, *, alone_s: float = 120.0) -> None:
        self.folder = folder
        self.socket = folder / "engine.sock"
        (folder / "tmp").mkdir()
        code = (
            "import sys; from pathlib import Path; from harness_trainer.supervision.part_host import PartHost; "
            f"sys.exit(PartHost(Path({str(self.socket)!r}), 'engine:8000', registry=Path({str(folder / 'owned')!r}), "
            f"alone_s={alone_s}).serve())"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder / "tmp")})
        self.host = RemoteHost(self.socket)

    @property
    def state(self) -> Path:
        return self.folder / "tmp" / "engine.part.json"

    def start(self, argv=SLEEP):
        log = self.folder / "part.log"
        return self.host.start(argv, env={"PART": "1"}, cwd=self.folder, log_path=log, kind="engine")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def hosted():
    folder = Path(tempfile.mkdtemp(prefix="ht"))
    hosted = Hosted(folder)
    yield hosted
    hosted.close()
    shutil.rmtree(folder)


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_part_lives_dies_and_is_started_again_like_one_of_this_machine(hosted):
    assert hosted.host.address() == ("engine", 8000)
    first = hosted.start()
    assert first.alive() and first.returncode is None and json.loads(hosted.state.read_text())["pid"] == first.pid
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait(10) == -signal.SIGKILL and not first.alive()
    second = hosted.start([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['PART']) + 6)"])
    assert second.wait(10) == 7
    third = hosted.start()
    assert third.stop(5.0) == third.stop(5.0) == -signal.SIGTERM and gone(third.pid)


def test_a_part_ends_with_whoever_ordered_it(hosted):
    order = (
        "import sys, time; from pathlib import Path; from harness_trainer.supervision.remote import RemoteHost; "
        f"p = RemoteHost(Path({str(hosted.socket)!r})).start({SLEEP!r}, env={{}}, cwd=Path('/'), "
        f"log_path=Path({str(hosted.folder / 'part.log')!r}), kind='engine'); print(p.pid, flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", order], stdout=subprocess.PIPE, text=True)
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert gone(pid)
    assert hosted.start().alive(), "the next one is served"


def test_one_part_at_a_time_and_a_host_that_is_busy_is_not_finished(hosted):
    part = hosted.start()
    with pytest.raises(SetupError, match="busy"):
        hosted.host.address(timeout_s=0.3)
    hosted.host.finish(timeout_s=0.3)
    assert part.alive()
    part.stop(0.0)
    hosted.host.finish()
    assert hosted.process.wait(10) == 0, "the run is over, and `docker compose up` with it"


def test_a_host_that_nobody_comes_back_to_ends(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="ht"))
    hosted = Hosted(folder, alone_s=0.3)
    time.sleep(0.6)
    assert hosted.process.poll() is None, "before the first order it waits: the trainer is being built, perhaps"
    hosted.start().stop(0.0)
    assert hosted.process.wait(10) == 0, "with any other code Docker would start it again, for nobody"
    shutil.rmtree(folder)


def test_what_cannot_be_started_and_who_is_not_there_are_named(hosted):
    with pytest.raises(SetupError, match="nothing-here is not an executable file"):
        hosted.start(["/nothing-here"])
    with pytest.raises(SetupError, match="docker compose logs gateway"):
        RemoteHost(hosted.folder / "gateway.sock").address(timeout_s=0.1)


def test_a_host_that_is_killed_takes_its_part_along_and_the_supervisor_sees_a_death(hosted):
    part = hosted.start()
    hosted.process.kill()
    hosted.process.wait()
    assert part.wait(10) == -9 and gone(part.pid, 20)


def test_the_health_check_knows_waiting_from_loading_from_dead(hosted):
    hosted.host.address()
    url = "http://127.0.0.1:9/health"
    assert check(hosted.socket, url, state=hosted.state) is None, "nothing was ordered"
    assert "nobody listens" in check(hosted.socket, url, state=hosted.folder / "another.part.json")
    part = hosted.start()
    assert check(hosted.socket, url, state=hosted.state) is None, "it loads"
    hosted.state.with_suffix(".answered").write_text(str(part.pid))
    assert "does not answer any more" in check(hosted.socket, url, state=hosted.state)
    part.stop(0.0)
    assert check(hosted.socket, url, state=hosted.state) is None


def test_an_engine_that_dies_while_loading_says_why(hosted):
    model = ModelInfo(hosted.folder / "no-model", "m", tied=False, max_len=512)
    logs = hosted.folder / "engine.log"
    engine = RemoteEngine(hosted.host, EngineConfig(), model=model, folder=hosted.folder, log_path=logs)
    with pytest.raises(EngineFailed, match="no-model' is neither a folder nor a Hugging Face id"):
        engine.start()
    settings = json.loads((hosted.folder / "engine.yaml").read_text())
    assert (settings["host"], settings["port"], settings["served_name"]) == ("0.0.0.0", 8000, "m")
    engine.stop()


def test_hosts_are_found_by_the_environment(monkeypatch):
    monkeypatch.delenv(PARTS, raising=False)
    assert RemoteHost.find("engine") is None
    monkeypatch.setenv(PARTS, "/run/parts")
    found = RemoteHost.find("engine")
    assert found is not None and found.folder == Path("/run/parts")
