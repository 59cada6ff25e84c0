"""The run folder: one live run, one config, and a clear line when it cannot be used."""

import errno
import json

import pytest

from harness_trainer.errors import RunDirError
from harness_trainer.rundir import RunDir, filesystem_errors, write_atomically


def test_the_same_config_continues_and_another_is_refused_with_the_difference(tmp_path):
    run = RunDir(tmp_path / "r")
    with run.opened({"model": "a", "learner": {"max_steps": 4}}):
        pass
    with run.opened({"model": "a", "learner": {"max_steps": 4}}):
        pass
    with pytest.raises(RunDirError, match=r"learner\.max_steps: 4 there, 8 now"):
        with run.opened({"model": "a", "learner": {"max_steps": 8}}):
            pass


def test_a_field_that_may_change_is_taken_over(tmp_path):
    run = RunDir(tmp_path / "r")
    with run.opened({"steps": 4}):
        pass
    with run.opened({"steps": 8}, may_change=frozenset({"steps"})):
        assert "8" in run.config.read_text()


def test_a_second_live_run_is_refused(tmp_path):
    run = RunDir(tmp_path / "r")
    with run.opened({}):
        with pytest.raises(RunDirError, match="another run is using"):
            with RunDir(tmp_path / "r").opened({}):
                pass
    with run.opened({}):
        pass


def test_a_damaged_config_is_refused(tmp_path):
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.config.write_text("a: [")
    with pytest.raises(RunDirError, match="cannot be read"):
        with run.opened({}):
            pass


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "r").write_text("")
    with pytest.raises(RunDirError, match="check the path"):
        with RunDir(tmp_path / "r").opened({}):
            pass


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "that you own"), (errno.EIO, "check the path")],
)
def test_each_file_system_error_says_what_to_do(tmp_path, number, advice):
    with pytest.raises(RunDirError, match=advice), filesystem_errors(tmp_path):
        raise OSError(number, "x")


def test_an_atomic_write_leaves_no_temporary_file(tmp_path):
    write_atomically(tmp_path / "f", "one")
    write_atomically(tmp_path / "f", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "two")]


def test_an_event_after_a_line_that_was_cut_off_has_a_line_of_its_own(tmp_path):
    run = RunDir(tmp_path)
    run.event("one")
    with run.events.open("a") as file:
        file.write('{"time": 1.0, "ki')  # a full disk
    run.event("two", said="\ud83d")
    run.event("three")
    first, cut, *others = run.events.read_text().split("\n")
    assert json.loads(first)["kind"] == "one" and cut == '{"time": 1.0, "ki' and others.pop() == ""
    assert [json.loads(line)["kind"] for line in others] == ["two", "three"]
