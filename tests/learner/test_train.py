"""Real training steps of a tiny model on the CPU, with a stub group source and a recording weight transfer."""

import itertools
import json
import math
import shutil
import threading
from collections import deque
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.checkpoints import read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.exactness import recompute_logprobs
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.rows import Row
from harness_trainer.learner.train import last_checkpoint, run_learner
from harness_trainer.rollouts.lineage import Lineage
from harness_trainer.rollouts.types import Outcome, RolloutResult

GOOD, BAD = 7, 8
PROMPT = [3, 4, 5, 6]


class Transfer:
    """Keeps what it is sent, as an engine would."""

    def __init__(self):
        self.calls = []
        self.weights = {}
        self.version = None
        self.announced = None

    def next_version(self, version):
        self.announced = version

    def init_weight_transfer(self):
        self.calls.append("init")

    def pause(self):
        self.calls.append("pause")

    def send_weights(self, iterator):
        self.weights = {name: tensor.clone() for name, tensor in iterator}
        self.calls.append(f"send v{self.announced}")

    def resume(self):
        self.version = self.announced
        self.calls.append("resume")

    def destroy(self):
        self.calls.append("destroy")


class PolicySource:
    """Makes each group from the weights that were last published: the log-probabilities are the policy's own."""

    def __init__(self, model_path, transfer, *, groups=None, fail=None):
        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.transfer = transfer
        self.scripted = None if groups is None else deque(groups)
        self.fail = fail
        self.next_id = 0
        self.events = []
        self.versions = []

    def start(self):
        self.events.append("start")

    def stop(self):
        self.events.append("stop")

    def check_health(self):
        if self.fail is not None:
            raise self.fail

    def policy_changed(self, version):
        assert self.transfer.version == version
        self.model.load_state_dict(self.transfer.weights)
        self.versions.append(version)

    def on_trained(self, group_ids, step):
        self.events.append(("trained", list(group_ids), step))

    def on_dropped(self, group_id, reason):
        self.events.append(("dropped", group_id, str(reason)))

    def lineage(self):
        return Lineage()

    def position(self):
        return self.next_id, {"ready": 1}

    def next_group(self, timeout_s):
        rewards = [1.0, 0.0, 0.5] if self.scripted is None else self.scripted.popleft()
        group_id = self.next_id
        self.next_id += 1
        sampled = [[GOOD, 9], [BAD, 10, 11], [12]]
        results = [
            RolloutResult(f"r{group_id}-{i}", group_id, "task", "pyagent", 0, Outcome.OK, reward)
            for i, reward in enumerate(rewards)
        ]
        rows = [[self.row(sampled[i % 3])] for i in range(len(rewards))]
        return TrainGroup(group_id, "task", results, rows)

    def row(self, completion):
        ids = PROMPT + completion
        start = len(PROMPT)
        logprobs = recompute_logprobs(self.model, ids)
        return Row(
            ids_N=ids,
            mask_N=[0] * start + [1] * len(completion),
            logprobs_N=[0.0] * start + logprobs[start:],
            versions_N=[-1] * start + [self.versions[-1]] * len(completion),
            turn_ids=["t"],
        )


class Run:
    """One call of `run_learner` and everything that it did."""

    def __init__(self, model_path, output_dir, **source_options):
        self.model_path, self.output_dir = model_path, output_dir
        self.transfer = Transfer()
        self.source = PolicySource(model_path, self.transfer, **source_options)
        self.reports = []

    def go(self, *, resume_from=None, base_version=0, on_step=None, temperature=1.0, engine=None, **config):
        defaults = {"max_steps": 3, "learning_rate": 0.01, "groups_per_step": 2, "token_budget": 256, "device": "cpu"}
        run_learner(
            LearnerConfig(**(defaults | config)),
            model_path=self.model_path,
            output_dir=self.output_dir,
            group_source=self.source,
            weight_transfer=self.transfer,
            on_step=on_step or self.reports.append,
            resume_from=resume_from,
            base_version=base_version,
            temperature=temperature,
            engine=engine,
        )
        return self


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """Three steps with a checkpoint after each, shared by the tests that only look."""
    return Run(tiny_model, tmp_path_factory.mktemp("run")).go(save_steps=1, save_total_limit=None)


def good_logprob(weights, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.load_state_dict(weights)
    return recompute_logprobs(model, [*PROMPT, GOOD])[-1]


def test_the_ratio_is_one_while_the_weights_are_those_that_sampled(trained):
    assert [report.step for report in trained.reports] == [1, 2, 3]
    for report in trained.reports:
        assert report.ratio_mean == pytest.approx(1.0, abs=1e-4)
        assert report.kl == pytest.approx(0.0, abs=1e-6)


def test_a_rewarded_token_becomes_more_likely(trained):
    before = recompute_logprobs(AutoModelForCausalLM.from_pretrained(trained.model_path), [*PROMPT, GOOD])[-1]
    assert good_logprob(trained.transfer.weights, trained.model_path) > before + 0.1


def test_weights_are_published_before_the_first_step_and_after_each(trained):
    sends = [call for call in trained.transfer.calls if call.startswith("send")]
    assert sends == ["send v1", "send v2", "send v3", "send v4"]
    assert trained.transfer.calls[:4] == ["init", "pause", "send v1", "resume"]
    assert trained.transfer.calls[-1] == "destroy"
    assert trained.source.versions == [1, 2, 3, 4]
    assert trained.source.events[0] == "start" and trained.source.events[-1] == "stop"


def test_a_tied_head_is_sent_by_its_own_name(trained):
    weights = trained.transfer.weights
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_the_report_counts_what_the_step_held(trained):
    report = trained.reports[0]
    assert report.num_groups == 2 and report.num_rollouts == 6 and report.num_rows == 6
    assert report.reward_mean == pytest.approx(0.5)
    assert report.trained_tokens == 2 * (2 + 3 + 1)
    # Both groups fold into one tree: three distinct prompt tokens, then the prompt's last token and the completion
    # once per branch (a node is keyed on its successor too).
    assert report.forwarded_tokens == 3 + 3 + 4 + 2
    assert report.num_micro_batches == 1
    assert report.policy_version == 2 and report.staleness_max == 0
    assert report.dropped == {}
    for name in ("loss", "grad_norm", "entropy", "sync_s", "wait_s", "fwd_bwd_s", "optimizer_s", "step_s"):
        assert getattr(report, name) is not None, name
    assert report.step_s >= report.fwd_bwd_s + report.sync_s
    json.dumps(asdict(report))


def test_groups_are_reported_as_trained_with_their_step(trained):
    marks = [event for event in trained.source.events if event[0] == "trained"]
    assert marks == [("trained", [0, 1], 1), ("trained", [2, 3], 2), ("trained", [4, 5], 3)]


def test_checkpoints_remember_version_and_groups(trained):
    assert last_checkpoint(trained.output_dir).name == "checkpoint-3"
    state = read_state(trained.output_dir / "checkpoint-2")
    assert (state.step, state.policy_version) == (2, 3)
    assert state.trained_groups == {1: [0, 1], 2: [2, 3]}
    assert (state.next_group, state.group_counts) == (4, {"ready": 1})


@pytest.mark.parametrize(
    "missing", ["trainer_state.json", "harness_state.json", "optimizer.pt", "rng_state.pth", "model.safetensors"]
)
def test_a_checkpoint_that_was_cut_off_is_passed_over(trained, tmp_path, missing):
    for step in (2, 3):
        shutil.copytree(trained.output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / missing).unlink()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_half_a_trainer_state_is_no_checkpoint(trained, tmp_path):
    shutil.copytree(trained.output_dir / "checkpoint-3", tmp_path / "checkpoint-3")
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.write_text(state.read_text()[:40])
    assert last_checkpoint(tmp_path) is None


def test_a_continued_run_goes_on_with_step_version_and_weights(trained, tmp_path):
    shutil.copytree(trained.output_dir / "checkpoint-2", tmp_path / "checkpoint-2")
    run = Run(trained.model_path, tmp_path)
    run.source.next_id = 4
    run.go(resume_from=last_checkpoint(tmp_path))
    assert [report.step for report in run.reports] == [3]
    # v3 was published after step 2; the checkpoint's weights go out again under a number of their own.
    assert run.source.versions == [4, 5]
    assert read_state(tmp_path / "checkpoint-3").trained_groups == {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    for name, tensor in run.transfer.weights.items():
        torch.testing.assert_close(tensor, trained.transfer.weights[name], atol=1e-6, rtol=0)


def test_a_version_that_an_engine_may_have_seen_is_never_used_again(trained, tmp_path):
    shutil.copytree(trained.output_dir / "checkpoint-2", tmp_path / "checkpoint-2")
    run = Run(trained.model_path, tmp_path).go(resume_from=tmp_path / "checkpoint-2", base_version=9)
    assert run.source.versions == [10, 11]


def test_a_finished_run_does_nothing(trained):
    run = Run(trained.model_path, trained.output_dir)
    run.go(resume_from=last_checkpoint(trained.output_dir))
    assert run.reports == [] and run.transfer.calls == []


def step_gradient(tiny_model, output_dir, *, token_budget=256, **config):
    """What one SGD step at learning rate 1 moves the weights by: minus the gradient."""
    run = Run(tiny_model, output_dir, groups=[[1.0, 0.0, 0.5]] * 2)
    run.go(max_steps=1, optimizer="sgd", learning_rate=1.0, max_grad_norm=0, token_budget=token_budget, **config)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    return {name: run.transfer.weights[name] - start[name] for name in start}, run.reports[0]


def relative_difference(a, b):
    norm = torch.stack([delta.norm() for delta in a.values()]).norm()
    assert norm > 0.1
    return torch.stack([(a[name] - b[name]).norm() for name in a]).norm() / norm


def test_recomputing_activations_gives_the_same_gradient(tiny_model, tmp_path):
    kept, _ = step_gradient(tiny_model, tmp_path / "a")
    recomputed, _ = step_gradient(tiny_model, tmp_path / "b", gradient_checkpointing=True)
    assert relative_difference(kept, recomputed) < 1e-6


def test_the_gradient_does_not_depend_on_how_the_step_is_split(tiny_model, tmp_path):
    whole, one = step_gradient(tiny_model, tmp_path / "a", token_budget=256)
    split, many = step_gradient(tiny_model, tmp_path / "b", token_budget=7)
    assert one.num_micro_batches == 1 and many.num_micro_batches > 2
    assert one.trained_tokens == many.trained_tokens
    assert many.forwarded_tokens > one.forwarded_tokens
    assert relative_difference(whole, split) < 1e-6
    for name in ("loss", "grad_norm", "ratio_mean", "kl", "entropy"):
        assert getattr(one, name) == pytest.approx(getattr(many, name), abs=1e-5), name


def test_groups_without_rewards_or_spread_are_dropped_and_counted(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path, groups=[[None] * 3, [1.0, 1.0], [1.0, 0.0, None], [0.5, None]])
    run.go(max_steps=1, groups_per_step=1)
    dropped = [event for event in run.source.events if event[0] == "dropped"]
    assert dropped == [("dropped", 0, "too_few_rewards"), ("dropped", 1, "no_spread")]
    assert run.reports[0].dropped == {"too_few_rewards": 1, "no_spread": 1}
    assert run.reports[0].num_rollouts == 2


def test_a_source_that_died_ends_training_with_its_error_and_everything_is_closed(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path, fail=TrainingFailed("the rollout runner died: see the log"))
    with pytest.raises(TrainingFailed, match="see the log"):
        run.go()
    assert run.source.events[-1] == "stop" and run.transfer.calls[-1] == "destroy"


def test_a_failed_weight_update_names_the_version_and_its_groups_count_as_trained(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path)
    send = run.transfer.send_weights

    def fail_second_time(iterator):
        if run.transfer.announced == 2:
            raise ConnectionError("409 update already active")
        send(iterator)

    run.transfer.send_weights = fail_second_time
    with pytest.raises(TrainingFailed, match="policy v2 failed: 409 update already active"):
        run.go()
    assert run.transfer.calls[-1] == "destroy" and run.source.events[-1] == "stop"
    # The optimizer had taken the step, so its groups must not be trained again.
    assert ("trained", [0, 1], 1) in run.source.events


def test_ctrl_c_goes_through_and_leaves_no_thread(tiny_model, tmp_path):
    before = set(threading.enumerate())

    def interrupt(report):
        raise KeyboardInterrupt

    run = Run(tiny_model, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.go(on_step=interrupt)
    assert run.source.events[-1] == "stop" and run.transfer.calls[-1] == "destroy"
    assert set(threading.enumerate()) == before


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path)
    row = run.source.row

    def impossible_row(completion):
        made = row(completion)
        made.logprobs_N[-1] = math.nan
        return made

    run.source.row = impossible_row
    with pytest.raises(TrainingFailed, match="step 1 is"):
        run.go()
    assert [call for call in run.transfer.calls if call.startswith("send")] == ["send v1"]


def test_a_checkpoint_that_cannot_be_written_is_one_line(tiny_model, tmp_path):
    (tmp_path / "checkpoint-1").write_text("a file where the folder should be")
    with pytest.raises(TrainingFailed, match="checkpoint-1 could not be written"):
        Run(tiny_model, tmp_path).go(max_steps=1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"tie": False}), ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0})],
)
def test_other_families_and_sliding_windows_train_exactly(tmp_path, build_model, family, changes):
    model = build_model(tmp_path / "model", family=family, **changes)
    run = Run(model, tmp_path / "run").go(max_steps=2)
    assert [report.ratio_mean for report in run.reports] == pytest.approx([1.0, 1.0], abs=1e-4)


class RestartedEngine:
    """What `EnginePresence` is to the trainer, without processes: told when the engine has died."""

    def __init__(self):
        self.is_lost = False
        self.die_under = None  # the call of `send` (from 1) under which it dies
        self.num_sends = 0

    def send(self, send, reach):
        if self.is_lost:
            self.is_lost = False
            reach()
        self.num_sends += 1
        send()
        if self.num_sends == self.die_under:  # after the trainer has counted the version up: it was told "done"
            self.is_lost = True


def test_an_engine_that_is_started_again_gets_the_same_weights_by_the_same_name_and_no_step_is_lost(
    tiny_model, tmp_path
):
    run, engine = Run(tiny_model, tmp_path), RestartedEngine()
    sent = []

    class Recorder(Transfer):
        def send_weights(self, iterator):
            super().send_weights(iterator)
            sent.append((self.announced, {name: tensor.clone() for name, tensor in self.weights.items()}))

    run.transfer = run.source.transfer = Recorder()
    make_group = run.source.next_group

    def next_group(timeout_s):
        if run.source.next_id == 2:  # in the middle of gathering the second step
            engine.is_lost = True
        return make_group(timeout_s)

    run.source.next_group = next_group
    engine.die_under = 4
    run.go(engine=engine)
    assert [version for version, _ in sent] == [1, 2, 2, 3, 3, 4]
    assert [report.policy_version for report in run.reports] == [2, 3, 4]
    for (version, weights), (again, same) in itertools.pairwise(sent):
        assert version != again or all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    assert run.transfer.calls.count("init") == 3, "each new engine is greeted before it is sent anything"
    trained = [event for event in run.source.events if event[0] == "trained"]
    assert [ids for _, ids, _ in trained] == [[0, 1], [2, 3], [4, 5]]
