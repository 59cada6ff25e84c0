"""The real trackers, offline: each step arrives under the names of docs/metrics.md, and a continued run is one run."""

import json
import os
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from stub_engine import StubEngine, serving
from test_metrics_arrive import RunFolder

from harness_trainer.learner.trackers import TESTED, TRACKERS, go_on, is_installed
from harness_trainer.rollouts.store import RolloutStore

OFFLINE = ("tensorboard", "trackio", "wandb")
HERE = [name for name in OFFLINE if is_installed(name)]
NAME = "tools/call_frequency"


class Tracked:
    """A run whose learner process lived twice: step 2 was taken, lost before its checkpoint, and taken again."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "TENSORBOARD"))},
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "TRACKIO_DIR": str(folder / "trackio"),
            "HOME": str(folder / "home"),
        }
        with serving(StubEngine()) as engine:
            run = RunFolder(folder, model, engine, report_to=HERE)
            self._live(run, max_steps=2)
            (folder / "checkpoints" / "checkpoint-2" / "trainer_state.json").unlink()
            self._live(run, max_steps=3)
            self.name = run.store.state("tracker_run")
            run.store.close()
        self.lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def _live(self, run: RunFolder, max_steps: int) -> None:
        config = run.config.model_copy(update={"max_steps": max_steps})
        spec = self.folder / "learner.json"
        spec.write_text(run.spec.model_copy(update={"config": config}).model_dump_json())
        argv = [sys.executable, "-m", "harness_trainer.learner", "--spec", str(spec)]
        done = subprocess.run(argv, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    def python(self, code: str) -> list:
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny_model):
    return Tracked(tmp_path_factory.mktemp("tracked"), tiny_model)


def needs(tracker):
    return pytest.mark.skipif(tracker not in HERE, reason=f"{tracker} is not installed: pip install '.[trackers]'")


def test_the_file_has_each_step_once(tracked):
    assert [line["step"] for line in tracked.lines] == [1, 2, 3]


@needs("tensorboard")
def test_tensorboard_shows_each_step_once_also_those_that_were_taken_again(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "tensorboard"))
    events.Reload()
    for name in (NAME, "reward", "sample/staleness_mean", "sync/load_s"):
        shown = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        sent = [(line["step"], pytest.approx(line["metrics"][name])) for line in tracked.lines]
        assert shown == sent, name
    assert {f"train/{name}" for name in tracked.lines[-1]["metrics"]} <= set(events.Tags()["scalars"])


@needs("trackio")
def test_trackio_has_one_run_with_every_step(tracked):
    code = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([[run, S.get_logs('harness-trainer', run)] for run in S.get_runs('harness-trainer')]))"
    )
    ((run, logs),) = tracked.python(code)
    assert run == tracked.name
    steps = [log for log in logs if f"train/{NAME}" in log]
    assert [log["train/global_step"] for log in steps] == [1, 2, 2, 3], "step 2 as it was lost, and as it stands"
    standing = {log["train/global_step"]: log for log in steps}
    for line in tracked.lines:
        shown = {name.removeprefix("train/"): value for name, value in standing[line["step"]].items()}
        for name, value in line["metrics"].items():
            assert shown[name] == pytest.approx(value), name


@needs("wandb")
def test_wandb_has_one_run_with_every_step(tracked):
    files = sorted((tracked.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {file.name for file in files} == {f"run-{tracked.name}.wandb"}, "one id for both lives"
    steps = [log for file in files for log in wandb_history(file) if f"train/{NAME}" in log]
    assert [log["train/global_step"] for log in steps] == [1, 2, 2, 3]
    standing = {log["train/global_step"]: log for log in steps}
    for line in tracked.lines:
        for name, value in line["metrics"].items():
            assert standing[line["step"]][f"train/{name}"] == pytest.approx(value), name


def wandb_history(file: Path) -> list[dict]:
    """The logged steps of an offline run: LevelDB's log format, a protocol buffer in each record."""
    from wandb.proto import wandb_internal_pb2

    data, position, record, found = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            record = b""
            if parsed.HasField("history"):
                items = parsed.history.item
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


# -- the run's identity ----------------------------------------------------------------------------------------------


def test_a_run_has_one_name_and_two_runs_of_one_folder_name_have_two(tmp_path):
    names = []
    for parent in ("a", "b"):
        folder = tmp_path / parent / "my run"
        folder.mkdir(parents=True)
        for _ in range(2):
            store = RolloutStore(folder / "store.sqlite")
            names.append(go_on(["wandb"], store, folder, after_step=0, environ={}))
            store.close()
    assert names[0] == names[1] != names[2] == names[3]
    assert names[0].startswith("my_run-") and len(names[0]) == len("my_run-") + 6


def test_what_a_person_has_set_stays_and_trackers_that_are_not_used_are_told_nothing(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    environ = {"WANDB_RUN_ID": "mine", "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tb")}
    name = go_on(["wandb", "tensorboard"], store, tmp_path, after_step=0, environ=environ)
    assert environ["WANDB_RUN_ID"] == "mine" and environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tb")
    assert environ["WANDB_RESUME"] == "allow" and environ["WANDB_PROJECT"] == "harness-trainer"
    bare: dict[str, str] = {}
    assert go_on(["trackio"], store, tmp_path, after_step=0, environ=bare) == name and bare == {}
    store.close()


def test_the_extra_pins_the_trackers_that_are_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["trackers"] == [f"{name}=={TESTED[name]}" for name in OFFLINE]
    assert set(TESTED) <= set(TRACKERS)
