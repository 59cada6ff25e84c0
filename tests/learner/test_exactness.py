"""The exactness check tells rounding from error, and tokens after a mid-reply update from the rest."""

import pytest
from transformers import AutoModelForCausalLM

from harness_trainer.learner.exactness import Exactness, check_row, recompute_logprobs
from harness_trainer.learner.rows import Row


@pytest.fixture(scope="module")
def policies(tmp_path_factory, build_model):
    return {
        version: AutoModelForCausalLM.from_pretrained(build_model(tmp_path_factory.mktemp("policy"), seed=version))
        for version in (1, 2)
    }


def row(ids, mask, versions, logprobs):
    return Row(ids, mask, [p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)], versions, ["t"])


def test_log_probabilities_are_of_the_tempered_distribution(policies):
    ids = [3, 4, 5]
    logits = policies[1](input_ids=policies[1].dummy_inputs["input_ids"].new_tensor([ids])).logits[0]
    expected = (logits / 0.5).log_softmax(-1)
    got = recompute_logprobs(policies[1], ids, temperature=0.5)
    assert got[0] is None
    assert got[1:] == pytest.approx([expected[0, 4].item(), expected[1, 5].item()], abs=1e-5)


def test_each_reply_is_judged_by_the_weights_that_sampled_it(policies):
    ids, mask, versions = [3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 1, 1], [-1, 1, 1, -1, 2, 2]
    by_version = {v: recompute_logprobs(policies[v], ids) for v in (1, 2)}
    logprobs = [by_version[v][i] if v > 0 else 0.0 for i, v in enumerate(versions)]
    found = check_row(row(ids, mask, versions, logprobs), policies.__getitem__)
    assert found == Exactness(same_max_diff=pytest.approx(0, abs=1e-6), num_same=4)


def test_tokens_after_an_update_in_mid_reply_are_reported_apart(policies):
    ids, mask, versions = [3, 4, 5, 6], [0, 1, 1, 1], [-1, 1, 2, 2]
    first = recompute_logprobs(policies[1], ids)
    found = check_row(row(ids, mask, versions, [0.0, first[1], -50.0, -50.0]), policies.__getitem__)
    assert (found.num_same, found.num_mixed) == (1, 2)
    assert found.same_max_diff < 1e-6 and found.mixed_max_diff > 10


def test_a_wrong_log_probability_or_version_is_seen(policies):
    ids, mask = [3, 4, 5], [0, 1, 1]
    right = recompute_logprobs(policies[1], ids)
    wrong_value = check_row(row(ids, mask, [-1, 1, 1], [0, right[1], right[2] - 0.01]), policies.__getitem__)
    assert wrong_value.same_max_diff == pytest.approx(0.01, abs=1e-4)
    wrong_version = check_row(row(ids, mask, [-1, 2, 2], [0, *right[1:]]), policies.__getitem__)
    assert wrong_version.same_max_diff > 1e-2


def test_rows_add_up():
    total = Exactness()
    assert total.same_max_diff is None
    total.merge(Exactness(same_max_diff=0.1, num_same=3))
    total.merge(Exactness(same_max_diff=0.05, num_same=2, mixed_max_diff=1.0, num_mixed=4))
    assert total == Exactness(same_max_diff=0.1, num_same=5, mixed_max_diff=1.0, num_mixed=4)
