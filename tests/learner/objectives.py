"""Settings of the objective that every test of it runs through: each choice once, and the usual recipes."""

from harness_trainer.learner.objective_config import ObjectiveConfig

OBJECTIVES = {
    "default": {},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant", "constant_tokens": 16},
    "rloo": {"advantage": "leave_one_out"},
    "global": {"advantage": "global"},
    "global_std": {"advantage": "global_std"},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "truncated": "mask"},
    "grpo": {"aggregation": "rollout_mean"},
    "cispo": {"loss": "cispo", "epsilon_high": 0.5},
    "gspo": {"loss": "gspo", "aggregation": "rollout_mean", "epsilon": 0.1, "epsilon_high": 0.2},
    "gspo_dual": {"loss": "gspo", "aggregation": "rollout_mean", "epsilon": 0.05, "dual_clip": 1.2},
    "dual_clip": {"dual_clip": 1.5},
    "tis": {"importance_correction": "token_truncate", "importance_max": 1.2},
    "tis_two_sided": {"importance_correction": "token_truncate", "importance_max": 1.2, "importance_min": 0.9},
    "icepop": {"importance_correction": "token_mask", "importance_max": 1.3, "importance_min": 0.8},
    "sequence_truncate": {"importance_correction": "sequence_truncate", "importance_max": 1.5},
    "sequence_mask": {"importance_correction": "sequence_mask", "importance_max": 2.0, "importance_min": 0.4},
    "geometric_mask": {
        "importance_correction": "geometric_mask",
        "importance_max": 1.1,
        "importance_min": 0.9,
        "aggregation": "rollout_mean",
    },
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2, "aggregation": "rollout_mean"},
    "penalty": {"truncated": "penalize", "truncation_penalty": 0.7},
    "turns": {"turn_reward_weight": 0.5},
    "turns_mean": {"turn_reward_weight": 0.5, "advantage": "group_mean", "aggregation": "rollout_mean"},
    "everything": {
        "advantage": "leave_one_out",
        "loss": "gspo",
        "aggregation": "rollout_mean",
        "epsilon_high": 0.3,
        "dual_clip": 3.0,
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "truncated": "mask",
        "turn_reward_weight": 0.3,
    },
}


def config_of(name):
    return ObjectiveConfig(**OBJECTIVES[name])
