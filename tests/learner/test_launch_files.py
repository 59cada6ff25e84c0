"""What `accelerate` is told for the configurations that we ship, and for a person's own."""

from pathlib import Path

import pytest
import yaml

from harness_trainer.errors import ConfigError
from harness_trainer.learner import launch
from harness_trainer.learner.config import LearnerConfig

SPEC = Path("/run/internal/learner.json")


def config(num_processes, accelerate_config="ddp"):
    return LearnerConfig(num_processes=num_processes, accelerate_config=str(accelerate_config))


def own_file(tmp_path, **changes):
    settings = yaml.safe_load(launch.config_file("multi_node").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**settings, **changes}))
    return path


def test_one_process_needs_no_launcher():
    assert launch.module_of(config(1)) == "harness_trainer.learner"
    assert launch.pinned(config(1, "no such file")) == config(1, "no such file")
    assert launch.on_other_machines(config(1), SPEC) is None


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "multi_node"])
def test_accelerate_takes_the_shipped_configurations(name):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(launch.config_file(name)))
    assert str(loaded.distributed_type.value) == ("MULTI_GPU" if name == "ddp" else "FSDP")
    assert loaded.mixed_precision == "no"
    assert name == "ddp" or (loaded.fsdp_config["fsdp_version"], loaded.use_cpu) == (2, False)


def test_the_processes_of_one_machine_meet_at_a_free_port(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 10)
    argv = launch.accelerate_arguments(config(4, "fsdp2"), SPEC, 0)
    assert argv[argv.index("--main_process_port") + 1] == "0"
    assert argv[argv.index("--num_processes") + 1] == "4"
    assert argv[argv.index("--num_cpu_threads_per_process") + 1] == "2"
    assert argv[-4:] == ["-m", "harness_trainer.learner", "--spec", str(SPEC)]


def test_a_chosen_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "--num_cpu_threads_per_process" not in launch.accelerate_arguments(config(2), SPEC, 0)


def test_several_machines_each_get_their_number_and_a_person_the_line_to_run(tmp_path):
    path = own_file(tmp_path, num_machines=3)
    argv = launch.accelerate_arguments(config(6, path), SPEC, 2)
    assert argv[argv.index("--machine_rank") + 1] == "2"
    assert "--main_process_port" not in argv  # it is the file's
    line = launch.on_other_machines(config(6, path), SPEC)
    assert line.startswith(f"python -m harness_trainer.learner.launch --spec {SPEC} --machine-rank N")
    assert "1 to 2" in line


def test_a_path_is_the_same_for_a_process_with_another_working_directory(tmp_path, monkeypatch):
    own_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert launch.pinned(config(2, "mine.yaml")).accelerate_config == str(tmp_path / "mine.yaml")
    assert launch.pinned(config(2)).accelerate_config == str(launch.config_file("ddp"))


@pytest.mark.parametrize("name", ["fsdp2", "multi_node", None])
def test_adafactor_is_refused_where_matrices_are_sharded(name, tmp_path):
    layout = name or str(own_file(tmp_path))
    with pytest.raises(ValueError, match="adamw_torch or sgd"):
        LearnerConfig(optimizer="adafactor", num_processes=2, accelerate_config=layout)
    for fits in (
        {"accelerate_config": layout},  # one process
        {"accelerate_config": "ddp", "num_processes": 2},
        {"accelerate_config": "/of/another/machine.yaml", "num_processes": 2},
    ):
        assert LearnerConfig(optimizer="adafactor", **fits).optimizer == "adafactor"


@pytest.mark.parametrize(
    ("text", "num_processes", "message"),
    [
        (None, 2, "is neither a file nor one of ddp, fsdp2, multi_node"),
        ("num_machines: [", 2, "cannot be read as a configuration"),
        ("just words", 2, "cannot be read as a configuration"),
        ("num_machines: 2", 3, "no multiple of the 2 machines"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_file_named(tmp_path, text, num_processes, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        launch.pinned(config(num_processes, path))
    assert str(path) in str(caught.value)
