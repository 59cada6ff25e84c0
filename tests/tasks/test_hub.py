"""Tasks from a dataset repository, through the real client against a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_hub import Hub, serving

from harness_trainer.errors import TaskError
from harness_trainer.tasks import load_tasks, pin_tasks
from harness_trainer.tasks.hub import Dataset, as_dataset

OLD, NEW = "a" * 40, "b" * 40


def task(name: str, instruction: str) -> dict[str, bytes]:
    return {
        f"{name}/task.toml": b"[metadata]\n",
        f"{name}/instruction.md": instruction.encode(),
        f"{name}/tests/test.sh": b"true",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    datasets = {
        "acme/tasks": {
            OLD: {"README.md": b"# tasks", **task("hello", "Say hello, as of old.")},
            NEW: {
                "README.md": b"# tasks",
                **task("hello", "Say hello."),
                "hello/tests/data.bin": bytes(range(256)) * 40,  # lies in the store of large files
                **task("hard/puzzle", "Solve it."),
                **task("hard/riddle", "Guess it."),
            },
        },
        "acme/single": {OLD: {name.removeprefix("x/"): data for name, data in task("x", "Do it.").items()}},
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HARNESS_TRAINER_CACHE", str(tmp_path / "ours"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub(datasets, tags={"v1": OLD, "refs/pr/1": OLD})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_dataset_is_downloaded_as_plain_files(hub: Hub, tmp_path: Path) -> None:
    (found,) = load_tasks("hf:acme/tasks")
    assert (found.name, found.instruction) == ("hello", "Say hello.")
    assert found.tests_dir is not None
    assert (found.tests_dir / "data.bin").read_bytes() == bytes(range(256)) * 40
    copied = [path for path in found.path.parent.rglob("*") if not path.is_dir()]
    assert len(copied) == 11 and not any(path.is_symlink() for path in copied)  # links could not enter a sandbox
    assert any(path.startswith("GET /large/") for path in hub.asked)


def test_a_repository_that_is_itself_one_task_is_named_after_itself(hub: Hub) -> None:
    assert [t.name for t in load_tasks("hf:acme/single")] == ["single"]


def test_a_subfolder_downloads_only_itself(hub: Hub) -> None:
    assert [t.name for t in load_tasks("hf:acme/tasks/hard")] == ["puzzle", "riddle"]
    assert not any("/hello/" in path for path in hub.asked)
    assert [t.name for t in load_tasks("hf:acme/tasks/hard/puzzle/, hf:acme/tasks")] == ["puzzle", "hello"]


@pytest.mark.parametrize("revision", ["v1", OLD, "refs%2Fpr%2F1"])
def test_a_revision_is_a_tag_a_commit_or_a_reference(hub: Hub, revision: str) -> None:
    (found,) = load_tasks(f"hf:acme/tasks@{revision}")
    assert found.instruction == "Say hello, as of old."


def test_without_prefix_too_unless_there_is_such_a_folder(hub: Hub, tmp_path: Path) -> None:
    assert len(load_tasks("acme/tasks@v1")) == 1
    (tmp_path / "acme").mkdir()
    with pytest.raises(TaskError, match="no tasks at 'acme/tasks'"):
        load_tasks("acme/tasks")


def test_a_kept_commit_is_not_asked_for_again(hub: Hub) -> None:
    spec = pin_tasks("hf:acme/tasks, examples")
    assert spec == f"hf:acme/tasks@{NEW},examples"
    load_tasks(spec)
    hub.asked.clear()
    hub.datasets["acme/tasks"]["c" * 40] = task("other", "Something else.")
    assert load_tasks(spec)[0].name == "hello" and hub.asked == []
    assert [t.name for t in load_tasks("hf:acme/tasks")] == ["other"]


def test_specs_without_a_dataset_are_pinned_as_they_are(hub: Hub) -> None:
    assert [pin_tasks(spec) for spec in ("examples", "cheer,word-list")] == ["examples", "cheer,word-list"]
    assert hub.asked == []


def test_paths_are_made_absolute_because_the_runner_works_in_another_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("examples", "mine", "a,b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert pin_tasks("examples,./mine") == f"examples,{tmp_path}/mine"
    assert pin_tasks("a,b") == f"{tmp_path}/a,b"
    assert hub.asked == []


def test_a_warm_cache_is_enough_when_the_hub_is_away(hub: Hub) -> None:
    load_tasks("hf:acme/tasks@v1")
    hub.broken = 503
    (found,) = load_tasks("hf:acme/tasks@v1")
    assert found.instruction == "Say hello, as of old."


def offline(spec: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "harness_trainer.cli", "tasks", "ls", spec]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_offline_a_warm_cache_works_and_a_cold_one_says_what_to_do(hub: Hub) -> None:
    load_tasks("hf:acme/tasks@v1")
    hub.asked.clear()
    warm = offline("hf:acme/tasks@v1")
    assert warm.returncode == 0 and "hello" in warm.stdout, warm.stderr
    cold = offline("hf:acme/single")
    assert cold.returncode == 2 and "HF_HUB_OFFLINE" in cold.stderr and "Traceback" not in cold.stderr, cold.stderr
    assert hub.asked == []


def test_a_gated_dataset_opens_with_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("acme/tasks")
    with pytest.raises(
        TaskError, match=r"'acme/tasks' is gated: ask for access at http.*/datasets/acme/tasks and set HF_TOKEN"
    ):
        load_tasks("hf:acme/tasks")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert len(load_tasks("hf:acme/tasks")) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf:acme/nothing", ["'acme/nothing' is not on the Hub", "HF_TOKEN"]),
        ("hf:acme/tasks@v9", ["no revision 'v9'", "/datasets/acme/tasks"]),
        ("hf:acme/tasks/soft", ["no folder 'soft'"]),
        ("hf:acme/tasks/hello/tests/test.sh", ["no folder"]),
        ("hf:acme/tasks@v1/hard", ["no folder 'hard'"]),
        ("hf:acme", ["names no dataset", "hf:owner/name"]),
        ("hf:acme/tasks/../../etc", ["names no dataset"]),
        ("hf:acme/tasks@../v1", ["names no dataset"]),
        ("hf:", ["names no dataset"]),
    ],
)
def test_what_is_not_there_is_explained_in_one_line(hub: Hub, spec: str, words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks(spec)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


def test_a_hub_that_fails_is_explained_in_one_line(hub: Hub) -> None:
    hub.broken = 500
    with pytest.raises(TaskError, match=r"'acme/tasks'.*(500|cannot be reached)") as caught:
        load_tasks("hf:acme/tasks")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../../../evil.sh", "/etc/evil.sh", "hello/../../../../../evil.sh"])
def test_a_file_name_that_climbs_out_writes_nothing(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.datasets["acme/tasks"][NEW][name] = b"evil"
    with pytest.raises(TaskError, match="acme/tasks"):
        load_tasks("hf:acme/tasks")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name == "evil.sh"]


def test_a_download_that_broke_off_is_not_taken_for_whole(hub: Hub) -> None:
    whole = hub.datasets["acme/tasks"][NEW].pop("hello/instruction.md")
    hub.datasets["acme/tasks"][NEW]["hello/instruction.md"] = whole
    real, hub.datasets["acme/tasks"][NEW] = hub.datasets["acme/tasks"][NEW], _Vanishing(hub.datasets["acme/tasks"][NEW])
    with pytest.raises(TaskError, match="acme/tasks"):
        load_tasks("hf:acme/tasks")
    hub.datasets["acme/tasks"][NEW] = real
    assert load_tasks("hf:acme/tasks")[0].instruction == "Say hello."


class _Vanishing(dict[str, bytes]):
    """Files that are listed, of which one cannot be had."""

    def get(self, name: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        return None if name == "hello/instruction.md" else super().get(name, default)


@pytest.mark.parametrize(
    ("word", "dataset"),
    [
        ("hf:acme/tasks", Dataset("acme/tasks")),
        ("hf:acme/tasks@v1.0/a/b/", Dataset("acme/tasks", "v1.0", "a/b")),
        ("acme/tasks@main", Dataset("acme/tasks", "main")),
        ("acme/tasks/sub", None),
        ("./tasks", None),
        ("tasks", None),
        ("~/tasks", None),
        ("/a/b", None),
    ],
)
def test_words_that_name_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, dataset: Dataset | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_dataset(word) == dataset
