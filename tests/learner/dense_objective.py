"""The objectives once more, as the papers write them: loops over rollouts and tokens, double precision, no packing.

The judge of `harness_trainer.learner.objective` and everything between rewards and the loss; shares no code with it.
"""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Token:
    logp: torch.Tensor  # a double that carries a gradient
    behaviour: float
    entropy: torch.Tensor | None = None
    reference: float | None = None
    turn: str = "t"


@dataclass
class Rollout:
    reward: float | None
    tokens: list[Token]
    truncated: bool = False
    turn_rewards: dict[str, float | None] = field(default_factory=dict)


def dense_loss(groups, config):
    """The loss of a step over lists of rollouts."""
    trained = []  # (rollout, advantage by turn)
    for rollouts, advantages in zip(groups, dense_advantages(groups, config), strict=True):
        turns = dense_turn_advantages(rollouts, config)
        for rollout, advantage, of_turns in zip(rollouts, advantages, turns, strict=True):
            masked = config.truncated == "mask" and rollout.truncated
            if advantage is not None and rollout.tokens and not masked:
                trained.append((rollout, lambda turn, a=advantage, of=of_turns: a + of.get(turn, 0.0)))
    num_tokens = sum(len(rollout.tokens) for rollout, _ in trained)
    # Terms that a clip holds are constants; the sum carries a gradient all the same.
    loss = sum((0 * t.logp for r, _ in trained for t in r.tokens), torch.zeros((), dtype=torch.double))
    for rollout, advantage_of in trained:
        weight = {
            "token_mean": lambda n: 1 / num_tokens,
            "rollout_mean": lambda n: 1 / len(trained) / n,
            "constant": lambda n: 1 / len(trained) / config.constant_tokens,
        }[config.aggregation](len(rollout.tokens))
        for token in rollout.tokens:
            loss = loss - weight * token_objective(token, advantage_of(token.turn), rollout, config)
    return loss


def dense_advantages(groups, config):
    penalty = config.truncation_penalty
    rewards = [[None if r.reward is None else r.reward - penalty * r.truncated for r in group] for group in groups]
    known = [[r for r in group if r is not None] for group in rewards]
    known = [group if len(group) >= 2 else [] for group in known]
    everyone = [r for group in known for r in group]
    centred = [r - sum(group) / len(group) for group in known for r in group]
    return [
        [advantage(group, i, of_group, everyone, centred, config.advantage) for i in range(len(group))]
        for group, of_group in zip(rewards, known, strict=True)
    ]


def advantage(group, index, known, everyone, centred, estimator):
    reward = group[index]
    if reward is None or not known:
        return None
    mean = sum(known) / len(known)
    if estimator == "group_std":
        return (reward - mean) / (std(known) + 1e-8)
    if estimator == "group_mean":
        return reward - mean
    if estimator == "leave_one_out":
        others = [r for i, r in enumerate(group) if r is not None and i != index]
        return reward - sum(others) / len(others)
    if estimator == "global_std":
        return (reward - mean) / (std(centred) + 1e-8)
    return (reward - sum(everyone) / len(everyone)) / (std(everyone) + 1e-8)


def std(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def dense_turn_advantages(rollouts, config):
    known = [
        r for rollout in rollouts if rollout.reward is not None for r in rollout.turn_rewards.values() if r is not None
    ]
    result = []
    for rollout in rollouts:
        of_turns = {}
        names = list(rollout.turn_rewards) if rollout.reward is not None else []
        for i, name in enumerate(names):
            total = 0.0
            for later in names[i:]:
                r = rollout.turn_rewards[later]
                if r is not None and len(known) >= 2:
                    plain = config.advantage in ("group_mean", "leave_one_out")
                    total += (r - sum(known) / len(known)) / (1.0 if plain else std(known) + 1e-8)
            of_turns[name] = config.turn_reward_weight * total
        result.append(of_turns)
    return result


def token_objective(token, advantage, rollout, config):
    ratio = torch.exp(token.logp - token.behaviour)
    low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    log_ratio_y = sum(t.logp - t.behaviour for t in rollout.tokens)
    if config.importance_correction != "none":
        weight = importance_weight(token, log_ratio_y.item(), len(rollout.tokens), config)
        value = weight * advantage * (1 + token.logp - token.logp.item())
    elif config.loss == "cispo":
        value = min(ratio.item(), high) * advantage * token.logp
    else:
        if config.loss == "gspo":
            s_y = torch.exp(log_ratio_y / len(rollout.tokens))
            # With one advantage per token the paper has a form of its own (GSPO-token).
            ratio = s_y.item() * torch.exp(token.logp - token.logp.item()) if config.turn_reward_weight else s_y
        value = clipped(ratio, advantage, low, high, config.dual_clip)
    if config.kl_coef:
        d = token.reference - token.logp
        value = value - config.kl_coef * (torch.exp(d) - d - 1)
    if config.entropy_coef:
        value = value + config.entropy_coef * token.entropy
    return value


def clipped(ratio, advantage, low, high, dual_clip):
    if advantage > 0:
        return ratio * advantage if ratio.item() < high else torch.tensor(high * advantage, dtype=torch.double)
    if dual_clip is not None and ratio.item() > dual_clip:
        return torch.tensor(dual_clip * advantage, dtype=torch.double)
    return ratio * advantage if ratio.item() > low else torch.tensor(low * advantage, dtype=torch.double)


def importance_weight(token, log_ratio_y, num_tokens, config):
    rho = math.exp(token.logp.item() - token.behaviour)
    rho_y = math.exp(log_ratio_y)
    low, high = config.importance_min or 0.0, config.importance_max
    return {
        "token_truncate": lambda: max(low, min(rho, high)),
        "token_mask": lambda: rho if low <= rho <= high else 0.0,
        "sequence_truncate": lambda: max(low, min(rho_y, high)),
        "sequence_mask": lambda: rho_y if low <= rho_y <= high else 0.0,
        "geometric_mask": lambda: 1.0 if low <= rho_y ** (1 / num_tokens) <= high else 0.0,
    }[config.importance_correction]()
