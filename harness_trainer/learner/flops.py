"""TRL's estimate of a model's arithmetic, made harmless: `trl_compat` puts it in the place of TRL's own.

Owns nothing but that an estimate that cannot be made is unknown. It only feeds `perf/mfu_*`, after a step was taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Estimate = Callable[[Any, int], float]


def nan_where_unknown(estimate: Estimate) -> Estimate:
    """`estimate(config, seq_len)`, or NaN, which leaves the metrics out, where it cannot read the model's config.

    Said once. TRL reads fields that many families do not have (`num_local_experts`, `decoder_sparse_step`).
    """
    is_told = False

    def or_nan(config: Any, seq_len: int) -> float:
        nonlocal is_told
        try:
            return estimate(config, seq_len)
        except Exception as error:  # each family lacks another field in another way; none is worth a run
            if not is_told:
                logger.info("perf/mfu is left out: TRL cannot estimate this model's arithmetic (%s)", error)
            is_told = True
            return math.nan

    return or_nan
