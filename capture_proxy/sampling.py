"""How a call samples: what the agent asked for, what the trainer pinned, and what that does to log-probabilities.

Owns the precedence of the two. It does not own budgets (`session`) nor what an engine makes of a field (`engines`).
Called by `session` and `turn`.
"""

from __future__ import annotations

from typing import Any

from capture_proxy.dialects.base import Call
from capture_proxy.types import SHAPED, Finding, SessionPolicy, Severity

# What "no shaping" means, said out loud: an engine fills fields that are left out from the model's own
# generation config, which often sets top_k and top_p.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# Fields that change which tokens are likely; under a pinned policy the agent's own values are recorded, not used.
_SHAPING = frozenset(NEUTRAL_SAMPLING) | {"seed", "logit_bias"}


def pin(call: Call, policy: SessionPolicy) -> dict[str, Any]:
    """The sampling that is in force.

    A policy that pins anything decides everything that shapes the distribution: fields it does not name are neutral.
    An empty policy leaves the agent its wishes. `stop` and `response_format` are the agent's unless pinned.
    """
    asked = {k: v for k, v in call.sampling.items() if k != "max_tokens"}
    if not policy.sampling:
        return asked
    kept = {k: v for k, v in asked.items() if k not in _SHAPING}
    return {**NEUTRAL_SAMPLING, **kept, **policy.sampling}


def shaping_findings(sampling: dict[str, Any], tool_choice: Any = None) -> list[Finding]:
    """WARN when log-probabilities of this sampling are not those of a plain temperature-scaled softmax.

    An engine forces a `tool_choice` as it does a format: of each token only what the call's grammar allows is left.
    """
    shaped = [
        f"{name}={sampling[name]}"
        for name, neutral in NEUTRAL_SAMPLING.items()
        if name != "temperature"
        and sampling.get(name) is not None
        and sampling[name] != neutral
        and not (name == "top_k" and sampling[name] <= 0)
    ]
    shaped += [name for name in ("logit_bias", "response_format") if sampling.get(name)]
    shaped += [] if tool_choice in (None, "auto", "none") else ["tool_choice"]
    return [Finding(Severity.WARN, SHAPED, ", ".join(shaped))] if shaped else []
