"""Whether the engine holds the weights that were sent: digests of a sample of tensors, compared on both sides.

Owns when to compare and what a difference means; which numbers are compared is `engine.digests`, which the engine
follows too. The weight transfers call it after an update, while the engine is still paused.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls
from harness_trainer.learner.sync_config import VerifySync

if TYPE_CHECKING:
    import torch

    from harness_trainer.engine.digests import Sample

logger = logging.getLogger(__name__)

REQUEST = "verify-now"  # in the run folder: somebody wants the next update compared
_NEVER = "or set learner.verify_sync to never"


def take_request(folder: Path) -> bool:
    """Whether somebody put `REQUEST` into the run folder; each is answered once. Raises OSError."""
    try:
        (folder / REQUEST).unlink()
    except FileNotFoundError:
        return False
    return True


class WeightCheck:
    """One per transfer. `due` says whether the next update is to be compared; set it to have one compared on demand."""

    def __init__(self, engine: EngineCalls, mode: VerifySync) -> None:
        self._engine = engine
        self._mode = mode
        self._sent: dict[str, Sample] = {}
        self.due = mode != "never"

    def watch(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, remembered as they pass: for transfers that never hold all of them."""
        from harness_trainer.engine.digests import sample_names, take_sample

        passed: dict[str, Sample] = {}
        for name, tensor in iterator:
            passed[name] = take_sample(tensor)
            yield name, tensor
        self._sent = {name: passed[name] for name in sample_names(passed)}

    def remember(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep what of this update is compared, now or on demand (some columns of some tensors)."""
        from harness_trainer.engine.digests import sample_names, take_sample

        self._sent = {name: take_sample(tensors[name]) for name in sample_names(tensors)}

    def compare_as(self, other: WeightCheck) -> None:
        """What another engine's check remembers of this update was sent to this engine too."""
        self._sent = other._sent

    def run(self) -> Counter[str]:
        """Compare the latest update; how many tensors were compared in each way (`loaded`, `received`), or could not be
        (`unseen`).

        Raises TrainingFailed naming the tensor that differs, or when the engine cannot be asked.
        """
        if not self._sent:
            raise TrainingFailed("no weights were sent yet, so there is nothing to compare")
        shapes = json.dumps({name: sample.shape for name, sample in self._sent.items()})
        try:
            answer = self._engine.post("collective_rpc", {"method": "harness_digests", "args": [shapes]})
        except TrainingFailed as error:
            raise TrainingFailed(
                f"the engine cannot tell which weights it holds ({error}): start it with --worker-extension-cls "
                f"harness_trainer.engine.worker_extension.DigestExtension, {_NEVER}"
            ) from error
        counts: Counter[str] = Counter()
        workers = answer.get("results") or [{}]
        for name, sample in self._sent.items():
            for worker in workers:
                counts[self._compare(name, sample, worker.get(name))] += 1
        self.due = self._mode == "always"
        logger.info("weights compared with the engine's: %s", dict(counts))
        _warn_of_unseen(counts)
        return counts

    @staticmethod
    def _compare(name: str, sample: Sample, theirs: dict[str, str] | None) -> str:
        """How the tensor was compared. Raises TrainingFailed."""
        import torch

        from harness_trainer.engine.digests import UNSEEN, digest

        if theirs is None:
            raise TrainingFailed(f"the engine has neither loaded nor received {name!r}: restart the run, {_NEVER}")
        if theirs["of"] == UNSEEN:
            return UNSEEN
        ours = digest(sample.part, getattr(torch, theirs["dtype"]))
        if ours != theirs["digest"]:
            raise TrainingFailed(
                f"the engine's {name!r} ({theirs['of']}) differs from what was sent: {theirs['digest']} there, {ours} "
                f"here; restart the run, and if this model's weights are changed on purpose while loading, {_NEVER[3:]}"
            )
        return theirs["of"]


def _warn_of_unseen(counts: Counter[str]) -> None:
    """What the engine keeps in parts, or in another form, after a transfer that keeps no copy of what it sent."""
    from harness_trainer.engine.digests import UNSEEN

    unseen, asked = counts[UNSEEN], counts.total()
    if unseen:
        logger.warning(
            "%s of %d weights could be compared with the engine's, %d not: it holds those in parts or in another form,"
            " and NCCL leaves no copy of what arrived. What speaks for them is the version, which the engine has"
            " confirmed, and each on-policy step, whose log-probabilities are compared with the engine's",
            asked - unseen or "none", asked, unseen,
        )  # fmt: skip
