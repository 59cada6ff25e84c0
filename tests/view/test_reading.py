"""The store and the files of a run that is half written, of another schema, replaced, or writing at this moment."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from harness_trainer.cli import main
from harness_trainer.errors import EngineFailed, RunDirError
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir
from harness_trainer.view import reading as reading_module
from harness_trainer.view.reading import Missing, reading
from harness_trainer.view.series import GrowingFile, curves, reward_error, steps_of
from tests.audit.made_run import MadeRun
from tests.view.conftest import client_of, page_of

NOBODY = 65534


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "policy_version": step + 1, **values})


def test_a_growing_file_is_read_on_and_a_half_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "metrics.jsonl")
    assert file.look().lines == []
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + "\n" + line(2)[:10])
    assert [one["step"] for one in file.look().lines] == [1]
    with path.open("a") as more:
        more.write(line(2)[10:] + "\n\n[1, 2]\n{broken\n\xff\xfe\n" + line(3) + "\n")
    look = file.look()
    assert [one["step"] for one in look.lines] == [1, 2, 3] and look.num_bad == 3
    path.write_text(line(1, loss=1.0) + "\n")  # cut, as by a run that goes back
    assert [one.get("loss") for one in file.look().lines] == [1.0]
    other = tmp_path / "other"
    other.write_text(line(1) + "\n" + line(5) + "\n")
    os.replace(other, path)  # the same size or more, another file
    assert [one["step"] for one in file.look().lines] == [1, 5]
    path.unlink()
    path.mkdir()
    assert file.look().lines == []


def test_a_step_counts_as_it_was_taken_last_and_odd_values_are_gaps() -> None:
    lines = [
        {"step": 2, "reward_mean": 0.5},
        {"step": 1, "reward_mean": 0.1},
        {"step": 2, "reward_mean": float("nan"), "reward_std": 0.5, "num_rollouts": 1},
        {"step": True, "reward_mean": 9.0},
        {"step": "x"},
        {"step": 3, "reward_mean": 10**400, "reward_std": "wide", "num_rollouts": 4},
        {"step": 4, "reward_mean": 1e305},
    ]
    (reward,) = (curve for curve in curves(steps_of(lines)) if curve.name == "reward")
    assert [(point.step, point.value) for point in reward.points] == [(1, 0.1), (2, None), (3, None), (4, None)]
    assert reward_error({"reward_std": 0.5, "num_rollouts": 5}) == 0.25
    assert reward_error({"reward_std": 0.0, "num_rollouts": 1}) is None and reward_error({}) is None


def test_half_written_metrics_leave_the_page_whole(made: MadeRun) -> None:
    with made.run.metrics.open("a") as file:
        file.write("{broken\n" + line(3)[:7])
    client = client_of(made.run)
    of = client.get("/api/overview").json()
    assert (of["num_steps"], of["bad_metric_lines"]) == (2, 1)
    assert "1 lines of metrics.jsonl cannot be read" in page_of(client, "/").text


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE run_state SET value = '3' WHERE key = 'rollout_schema'", "harness-trainer audit"),
        ("UPDATE run_state SET value = '99' WHERE key = 'rollout_schema'", "use the harness-trainer that wrote it"),
        ("UPDATE meta SET value = '1' WHERE key = 'capture_schema'", "capture schema 1"),
    ],
)
def test_another_schema_is_refused_with_what_to_do(made: MadeRun, sql: str, says: str) -> None:
    made.sql(sql)
    client = client_of(made.run)
    answer = client.get("/api/overview")
    assert answer.status_code == 503 and says in answer.json()["error"]
    assert says in page_of(client, "/rollouts", 503).text
    page_of(client, "/settings")  # what needs no store goes on


def test_the_command_that_it_names_brings_the_store_up_to_date(made: MadeRun) -> None:
    made.sql("UPDATE run_state SET value = '3' WHERE key = 'rollout_schema'")
    client = client_of(made.run)
    assert client.get("/api/overview").status_code == 503
    assert main(["audit", str(made.run.path)]) in (0, 1)
    assert client.get("/api/overview").json()["num_steps"] == 2


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be one" * 40])
def test_a_file_that_is_no_store(tmp_path: Path, content: bytes) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.store.write_bytes(content)
    with pytest.raises(RunDirError) as caught, reading(run.store):
        pass
    assert isinstance(caught.value, Missing) == (content == b"")
    assert client_of(run).get("/").status_code == (200 if content == b"" else 503)


def test_a_question_that_takes_too_long_is_given_up(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the run's log could not be moved into its file meanwhile."""
    monkeypatch.setattr(reading_module, "_LONGEST_S", 0.05)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT MAX(x) FROM n"
    with pytest.raises(RunDirError, match="interrupted"), reading(made.run.store) as db:
        db.execute(endless).fetchall()


def test_a_reader_never_writes_and_a_writer_never_waits_for_it(made: MadeRun) -> None:
    with reading(made.run.store) as db:
        with closing(RolloutStore(made.run.store)) as store:
            store.set_state("k", "v")  # committed while the snapshot is open
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                db.execute("DELETE FROM rollouts")
            assert db.execute("SELECT 1 FROM run_state WHERE key = 'k'").fetchone() is None
    with reading(made.run.store) as db:
        assert db.execute("SELECT value FROM run_state WHERE key = 'k'").fetchone() == ("v",)


def test_a_store_beside_which_nothing_can_be_written(made: MadeRun) -> None:
    """As on compose's read-only volume: SQLite can make no log there, and needs none once a run is over."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with closing(sqlite3.connect(made.run.store)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(made.run.store, folder)
        os.chmod(folder / "store.sqlite", 0o644)
        folder.chmod(0o555)
        was = os.geteuid()
        if was == 0:  # to root every folder is open
            os.seteuid(NOBODY)
        try:
            with reading(folder / "store.sqlite") as db:
                assert db.execute("SELECT COUNT(*) FROM rollout_groups").fetchone()[0] > 0
        finally:
            os.seteuid(was)
            folder.chmod(0o755)
        assert [path.name for path in folder.iterdir()] == ["store.sqlite"]


def test_a_live_run_is_seen_growing(made: MadeRun) -> None:
    client = client_of(made.run)
    with made.run.opened(yaml.safe_load(made.run.config.read_text())):
        first = client.get("/api/stamp").json()["stamp"]
        assert client.get("/api/overview").json()["state"] == "running"
        counts = []
        with closing(RolloutStore(made.run.store)) as store:
            store.open_group(90, "new", "h")
            for n in range(3):
                store.start_rollout(f"new{n}", 90, n, 0)
                counts.append(client.get("/api/overview").json()["outcomes"]["running"])
        assert counts == [counts[0], counts[0] + 1, counts[0] + 2]
        with made.run.metrics.open("a") as file:
            file.write(line(3, reward_mean=0.75) + "\n")
        of = client.get("/api/overview").json()
        assert of["num_steps"] == 3 and of["last_step"]["reward_mean"] == 0.75
        second = client.get("/api/stamp").json()["stamp"]
        assert second != first and client.get("/api/stamp").json()["stamp"] == second
        made.sql("INSERT OR REPLACE INTO run_state VALUES ('runner_error', 'the breaker opened')")
        assert client.get("/api/overview").json()["state"] == "failing"
    of = client.get("/api/overview").json()
    assert of["state"] == "failed" and of["failure"] == "the breaker opened"


def test_why_a_run_failed_is_shown_until_it_is_started_again(made: MadeRun) -> None:
    config = yaml.safe_load(made.run.config.read_text())
    with pytest.raises(EngineFailed), made.run.opened(config):
        raise EngineFailed("the engine died 3 times")
    client = client_of(made.run)
    of = client.get("/api/overview").json()
    assert (of["state"], of["failure"]) == ("failed", "the engine died 3 times")
    assert "the engine died 3 times" in page_of(client, "/").text
    made.run.event("started", part="engine", pid=1)
    assert client.get("/api/overview").json()["failure"] is None


def test_looking_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """A look takes the run's lock for a moment; a run that starts in that moment must not be refused."""
    run = RunDir(tmp_path / "run")
    with run.opened({}):
        pass
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            run.is_held()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(40):
            with run.opened({}):
                assert run.is_held()
    finally:
        over.set()
        watcher.join()
    with run.opened({}), pytest.raises(RunDirError, match="another run"), RunDir(run.path).opened({}):
        pass


def test_a_run_that_was_stopped_before_its_end_is_interrupted(made: MadeRun) -> None:
    made.settings("learner", max_steps=9)
    of = client_of(made.run).get("/api/overview").json()
    assert (of["state"], of["max_steps"]) == ("interrupted", 9)
    made.run.config.write_text("learner: [")
    of = client_of(made.run).get("/api/overview").json()
    assert of["max_steps"] is None, "a config that cannot be read is not known"
