"""Every metric of a step: name, unit, meaning, and who computes it. The table of `docs/metrics.md` is made of this.

Owns names and words, no numbers: `metrics` computes ours, TRL its own. A part in angle brackets stands for a name that
a run brings along. `python -m harness_trainer.learner.metric_names` prints the table; a test compares the page with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """Example: Metric("tools/<tool>/call_total", "calls", "how often the model asked for the tool")."""

    name: str
    unit: str
    meaning: str  # one line
    by_trl: bool = False  # TRL computes it; else we do, under TRL's or OpenEnv's name where they have one

    def matches(self, name: str) -> bool:
        pattern = re.sub(r"<\w+>", r"[^/]+", re.escape(self.name).replace(r"\<", "<").replace(r"\>", ">"))
        return re.fullmatch(pattern, name) is not None


# Of what is given once for all rollouts of a step, and once more for each agent and each source.
PER_HARNESS = frozenset(
    (
        "reward",
        "reward_std",
        "rollout/correctness_mean",
        "rollout/ok_frac",
        "rollout/truncated_frac",
        "rollout/scored_frac",
        "rollout/duration_s",
        "rollout/turns_mean",
        "rollout/samples_per_rollout",
        "rollout/bridged_frac",
        "rollout/fork_frac",
        "rollout/drift_tokens_mean",
        "completions/mean_length",
        "tools/call_frequency",
        "tools/failure_frequency",
    )
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards and outcomes": (
        Metric("reward", "reward", "mean over the scored rollouts, each counted once however many rows it became"),
        Metric("reward_std", "reward", "population standard deviation within the group, mean over the same rollouts"),
        Metric(
            "rewards/<name>", "reward", "mean of a named reward of the tests, over the scored rollouts that have it"
        ),
        Metric(
            "rollout/correctness_mean",
            "reward",
            "the verifier's own reward where a reward function has the last word, mean over the rollouts that have one",
        ),
        Metric("rollout/ok_frac", "share", "of the rollouts that stand for their slots, those with the outcome `ok`"),
        Metric("rollout/truncated_frac", "share", "of the same, those cut by a limit"),
        Metric("rollout/scored_frac", "share", "of the same, those with a reward"),
        Metric("outcome/<outcome>_total", "attempts", "by outcome, retried attempts of the step's groups included"),
        Metric("groups/dropped_total", "groups", "that the learner would not train, since the step before"),
        Metric("groups/dropped_<reason>_total", "groups", "the same by reason"),
        Metric(
            "eval_reward", "reward", "evaluation of the policy that the step started from: mean of the tasks' means"
        ),
        Metric("eval_reward_ci_<end>", "reward", "its 95 % interval, `low` and `high`"),
        Metric("eval_pass_at_1", "share", "the same evaluation: rollouts that passed, mean over tasks"),
        Metric("eval_pass_at_1_ci_<end>", "share", "its 95 % interval, `low` and `high`"),
    ),
    "Rollouts": (
        Metric("rollout/duration_s", "s", "from first to last stage, waits included, mean over rollouts"),
        Metric("rollout/warm_frac", "share", "of the rollouts that got a sandbox, those that found it started"),
        Metric("rollout/turns_mean", "turns", "of the agent, mean over rollouts with a capture"),
        Metric("rollout/turns_max", "turns", "the most of them"),
        Metric("rollout/side_turns_mean", "turns", "calls beside the agent's work (titles, summaries), likewise"),
        Metric("rollout/samples_per_rollout", "rows", "training rows, mean over rollouts that have any"),
        Metric("rollout/bridged_frac", "share", "of the agent's turns, those whose prompt goes on from recorded ids"),
        Metric("rollout/fork_frac", "share", "of the transitions between trained turns, those that began another row"),
        Metric(
            "rollout/drift_tokens_mean", "tokens", "held tokens that the next prompt left out, mean over transitions"
        ),
        Metric("rollout/drift_tokens_max", "tokens", "the most of them"),
        Metric("completions/mean_length", "tokens", "sampled in a rollout, all its turns together, mean over rollouts"),
        Metric("completions/min_length", "tokens", "the least of them"),
        Metric("completions/max_length", "tokens", "the most of them"),
        Metric("stage/<stage>/mean_s", "s", "of a stage of a rollout, mean over those that reached it"),
        Metric("stage/<stage>/p95_s", "s", "95th percentile of the same, linear between ranks"),
    ),
    "Tools": (
        Metric(
            "tools/call_frequency", "calls", "per rollout, over the rollouts whose calls were captured; 0 = no call"
        ),
        Metric(
            "tools/failure_frequency",
            "share",
            "failed calls by calls, over the rollouts with at least one result that tells whether its tool failed",
        ),
        Metric("tools/<tool>/call_total", "calls", "how often the model asked for the tool (the 24 most called)"),
        Metric("tools/<tool>/failure_total", "calls", "failed, where a result of the tool tells"),
        Metric("tools/<tool>/latency_s", "s", "of a call that ran, mean; where the turns are ours"),
        Metric("tools/latency_s", "s", "the same over all tools"),
        Metric("tools/parallel_calls_mean", "calls", "of a turn that calls tools, where the turns are ours"),
        Metric("tools/loop_exhausted_frac", "share", "of those rollouts, cut by `max_tool_calling_iterations`"),
        Metric("tools/unknown_name_total", "calls", "by a name that no tool of the episode has"),
    ),
    "Per agent": (
        Metric("harness/<harness>/reward", "reward", "as `reward`, over the rollouts of that agent"),
        Metric("harness/<harness>/reward_std", "reward", "as `reward_std`, likewise"),
        Metric("harness/<harness>/rollout/<metric>", "as above", "likewise: the `rollout/` means and shares"),
        Metric("harness/<harness>/completions/mean_length", "tokens", "likewise"),
        Metric("harness/<harness>/tools/<metric>", "as above", "likewise: `call_frequency`, `failure_frequency`"),
        Metric(
            "harness/<harness>/facts/<name>",
            "its own",
            "a number that the episodes of a white-box source report, or that a reward function logs by `log_metric`,"
            " mean over the rollouts that have it (the 24 most told)",
        ),
    ),
    "Per source, in a run with `sources`": (
        Metric("source/<source>/groups_total", "groups", "of the step, that are of this source"),
        Metric("source/<source>/reward", "reward", "as `reward`, over the rollouts of that source"),
        Metric("source/<source>/reward_std", "reward", "as `reward_std`, likewise"),
        Metric("source/<source>/rewards/<name>", "reward", "as `rewards/<name>`, likewise"),
        Metric("source/<source>/rollout/<metric>", "as above", "likewise: the `rollout/` means and shares"),
        Metric("source/<source>/completions/mean_length", "tokens", "likewise"),
        Metric("source/<source>/tools/<metric>", "as above", "likewise: `call_frequency`, `failure_frequency`"),
        Metric("source/<source>/facts/<name>", "its own", "as `harness/<harness>/facts/<name>`, likewise"),
        Metric("source/<source>/eval_reward", "reward", "as `eval_reward`, over the tasks of that source"),
        Metric("source/<source>/eval_reward_ci_<end>", "reward", "its 95 % interval, `low` and `high`"),
        Metric("source/<source>/eval_pass_at_1", "share", "as `eval_pass_at_1`, likewise; the source says what passes"),
        Metric("source/<source>/eval_pass_at_1_ci_<end>", "share", "its 95 % interval, `low` and `high`"),
    ),
    "Off-policyness and queues": (
        Metric("sample/staleness_mean", "steps", "a row's oldest trained token to the policy, mean over rows"),
        Metric("sample/staleness_max", "steps", "the most of them"),
        Metric("sample/staleness_<n>_frac", "share", "of the rows, those that many steps away (`over_7` = more)"),
        Metric("sample/time_in_queue_s", "s", "from a group's hand-over to its step, mean over the step's groups"),
        Metric("queue/running_rollouts", "rollouts", "under way when the step was over"),
        Metric("queue/running_groups", "groups", "with rollouts still to come, at the same time"),
        Metric("queue/ready_groups", "groups", "waiting for the learner, at the same time"),
    ),
    "Time": (
        Metric("perf/learner_idle_frac", "share", "of the step, spent waiting for groups"),
        Metric("perf/engine_idle_frac", "share", "of the step *before*, without any model call under way"),
        Metric("perf/step_s", "s", "from the end of the optimizer step before to that of this one", True),
        Metric("perf/rollout_wait_s", "s", "waiting for groups", True),
        Metric("perf/fwd_bwd_s", "s", "forward and backward passes", True),
        Metric("perf/fwd_s", "s", "of that, forward passes", True),
        Metric("perf/optimizer_s", "s", "optimizer step", True),
        Metric("perf/weight_sync_s", "s", "weight update, mean of two in the first step of a start", True),
        Metric("perf/weight_sync_<phase>_s", "s", "its phases by TRL's marks: `pause`, `barrier`, `transfer`", True),
        Metric(
            "sync/<phase>_s", "s", "phases of the update by ours: `write`, `pause`, `load`, `verify`, `resume`, ..."
        ),
        Metric(
            "perf/forwarded_tok_s_<base>", "tokens/s", "by compute time (`fwd_bwd`) or all time (`wall_clock`)", True
        ),
        Metric("perf/trained_tok_s_wall_clock", "tokens/s", "trained tokens by all time", True),
        Metric(
            "perf/mfu_<base>",
            "share",
            "of the GPU's peak FLOPs, on the same two bases; absent on a CPU and where TRL cannot estimate a model's",
            True,
        ),
    ),
    "Batch": (
        Metric("batch/trained_per_forwarded", "ratio", "trained tokens by distinct tokens that went through the model"),
        Metric("batch/forwarded_tokens_per_step", "tokens", "distinct tokens that went through the model", True),
        Metric("batch/trained_tokens_per_step", "tokens", "with a loss", True),
        Metric("batch/samples_per_step", "rows", "of the step", True),
        Metric("batch/groups_per_step", "groups", "of the step", True),
        Metric("batch/microbatches_per_step", "micro-batches", "of the step", True),
        Metric("batch/samples_per_row", "rows", "packed into one prefix tree", True),
        Metric("batch/row_tokens_<how>", "tokens", "of a prefix tree, `mean` and `max`", True),
        Metric("batch/row_imbalance", "ratio", "largest load of a process by the mean load", True),
        Metric("batch/row_fill_frac", "share", "of the token budget that is used", True),
        Metric("batch/packing_ratio", "ratio", "tokens of the rows by distinct tokens", True),
        Metric("batch/pad_frac", "share", "padding between processes", True),
        Metric("batch/masked_token_frac", "share", "of the rows' tokens, those without a loss", True),
        Metric("sample/forwarded_tokens_<how>", "tokens", "of a row, `mean` and `max`", True),
        Metric("sample/trained_tokens_mean", "tokens", "of a row, with a loss", True),
    ),
    "Loss": (
        Metric("loss", "-", "of the step", True),
        Metric("grad_norm", "-", "before clipping", True),
        Metric("learning_rate", "-", "of the step", True),
        Metric("aux_loss", "-", "of a mixture-of-experts router", True),
        Metric("ratio", "ratio", "new by old probability, mean over trained tokens; 1 = on policy"),
        Metric("ratio_max", "ratio", "the largest of them"),
        Metric("kl", "nats", "approximate KL(old, new), mean over trained tokens"),
        Metric(
            "sampling/logprob_difference_mean",
            "nats",
            "the learner's log-probability less the engine's, mean over trained tokens; about 0 = on policy",
        ),
        Metric("kl_ref", "nats", "approximate KL(new, start of the run), with a `kl_coef`"),
        Metric("entropy", "nats", "mean over trained tokens"),
        Metric("clip_ratio/<bound>_mean", "share", "of trained tokens cut: `low`, `high`, `region` = both, `dual`"),
        Metric("clip_ratio/low_min", "share", "the least of a rollout"),
        Metric("clip_ratio/high_max", "share", "the most of a rollout"),
        Metric("cispo_clip_ratio", "share", "of trained tokens whose weight CISPO cut"),
        Metric("sampling/importance_sampling_ratio/<how>", "ratio", "weight of the correction: `mean`, `min`, `max`"),
        Metric("sampling/importance_sampling_ratio/bounded_frac", "share", "of trained tokens, weight cut or masked"),
    ),
}


def find(name: str) -> Metric | None:
    """What the table says of a metric; None = it is not in the table."""
    return next((metric for section in SECTIONS.values() for metric in section if metric.matches(name)), None)


def table() -> str:
    """Markdown: one table for each section."""
    parts = []
    for title, section in SECTIONS.items():
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning}{' (TRL)' if m.by_trl else ''} |" for m in section]
        parts.append("\n".join([f"## {title}", "", "| name | unit | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(table(), end="")
