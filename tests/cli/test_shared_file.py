"""One `--config` file for several commands and other flags: what `train --dry-run` writes is one to start from."""

import pytest
import yaml

from harness_trainer.cli import main
from harness_trainer.cli.doctor import _of_run
from harness_trainer.config import CollectConfig


@pytest.fixture
def shown(capsys):
    def show(*argv):
        assert main([argv[0], "--dry-run", *argv[1:]]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return yaml.safe_load(out), err

    return show


@pytest.fixture
def file(tmp_path):
    def write(settings):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        return ["--config", str(tmp_path / "run.yaml")]

    return write


@pytest.mark.parametrize(
    "flags",
    [
        ["--sandbox", "docker"],
        ["--sandbox", "e2b"],
        ["--sandbox", "harbor:daytona"],
        ["--gateway.expose", "direct", "--gateway.public-url", "https://x.example"],
        ["--learner.weight-sync", "nccl"],
        ["--env", "class:my_env.py:Env", "--tasks", "rows.jsonl"],
    ],
)
def test_a_file_that_dry_run_wrote_takes_any_flag_as_no_file_does(shown, file, flags):
    start, _ = shown("train")
    assert shown("train", *file(start), *flags) == (shown("train", *flags)[0], "")
    back, _ = shown("train", *flags)
    assert shown("train", *file(back), *flags) == (back, "")


def test_between_kinds_what_somebody_set_is_kept_or_named(shown, file):
    box = {"type": "local", "network": "none", "root": "/x", "limits": {"cpu_s": 600, "memory_mb": 99, "file_mb": 512}}
    got, err = shown("train", *file({"sandbox": box}), "--sandbox", "docker")
    assert got["sandbox"]["network"] == "none"
    usual = shown("train", "--sandbox", "docker")[0]["sandbox"]["limits"]
    assert got["sandbox"]["limits"] == {**usual, "memory_mb": 99}, "local's own limits are not docker's"
    assert (
        err.startswith("harness-trainer: note: --sandbox docker has no sandbox.root: passed over in /")
        and err.count("\n") == 1
    )
    expose = {"type": "direct", "listen": "0.0.0.0:8000"}
    got, err = shown("train", *file({"gateway": {"expose": expose}}), "--gateway.expose", "cloudflared")
    assert got["gateway"]["expose"]["type"] == "cloudflared" and "no gateway.expose.listen" in err
    assert main(["train", "--dry-run", "--gateway.expose", "cloudflared", "--gateway.expose.listen", "a:1"]) == 2


def test_a_setting_of_another_kind_names_that_kind_wherever_the_part_is(capsys):
    assert main(["train", "--dry-run", "--gateway.expose", "cloudflared", "--gateway.expose.listen", "a:1"]) == 2
    assert capsys.readouterr().err == (
        "harness-trainer: gateway.expose.listen: gateway.expose cloudflared has no such setting; "
        "choose --gateway.expose direct\n"
    )


def test_rollout_reads_trains_file_and_one_note_names_what_only_training_needs(shown, file, capsys):
    start, _ = shown("train")
    got, err = shown("rollout", *file(start), "--samples", "8")
    assert got == shown("rollout", "--samples", "8")[0]
    passed_over = "learner, keep_weights, rollouts.evaluation are passed over"
    assert err == f"harness-trainer: note: nothing is trained here: {passed_over}\n"
    whole = {"rollouts": {"evaluation": {"tasks": "held-out"}, "seed": 3}, "learner": {"max_steps": 2}}
    got, err = shown("rollout", *file(whole))
    assert got["rollouts"]["seed"] == 3 and "learner, rollouts.evaluation are" in err
    assert CollectConfig.model_validate(got).as_run().rollouts.evaluation.tasks is None
    assert shown("rollout", *file({"model": "x"}))[1] == ""
    # Flags for them stay errors: nobody gives one to a command that he shares with another.
    assert main(["rollout", "--dry-run", "--rollouts.evaluation.tasks", "held-out"]) == 2
    with pytest.raises(SystemExit):
        main(["rollout", "--dry-run", "--learner.max-steps", "3"])
    # A file may be shared the other way only by what both have.
    capsys.readouterr()
    assert main(["train", "--dry-run", *file({"samples": 8})]) == 2
    assert "samples: there is no such setting" in capsys.readouterr().err


def test_the_check_before_a_rollout_reads_the_same_file_and_leaves_the_note_to_the_rollout(shown, file, capsys):
    argv = file(shown("train", "--harness", "pi")[0])
    config, _, _ = _of_run("rollout", argv, quiet=True)
    assert config.harness == "pi" and capsys.readouterr().err == ""
    _of_run("rollout", argv, quiet=False)
    assert "passed over" in capsys.readouterr().err


def test_lists_are_given_as_the_docs_have_them(shown, file):
    assert shown("train", "--engine.gpus", "2,3")[0]["engine"]["gpus"] == ["2", "3"]
    assert shown("train", "--engine.gpus", "[2, 3, 2, 3]")[0]["engine"]["gpus"] == ["2", "3", "2", "3"]
    assert shown("train", *file({"engine": {"gpus": [2, "GPU-x"]}}))[0]["engine"]["gpus"] == ["2", "GPU-x"]
    assert shown("train", "--learner.report-to", "tensorboard")[0]["learner"]["report_to"] == ["tensorboard"]
    assert shown("rollout", "--engine.extra-args=--a,--b")[0]["engine"]["extra_args"] == ["--a", "--b"]


def test_a_number_that_is_none_is_refused_with_the_lists_flag(capsys, file):
    assert main(["train", "--dry-run", *file({"engine": {"gpus": [True]}})]) == 2
    assert "engine.gpus.0: " in (err := capsys.readouterr().err) and "set it with --engine.gpus or in" in err
