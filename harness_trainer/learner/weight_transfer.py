"""Weight transfer by file, on the trainer's side: write the policy, tell the engine, name the new version.

Owns the file, the order of the calls around it, and that the engine samples again whatever goes wrong. Loading is the
engine's part (`engine.shm_engine`). TRL's trainer calls `ShmWeightTransfer` through its `WeightTransferProtocol`; the
learner calls `next_version` before each sync and reads `last_timings` after it.

A sync is write, pause, start, update, finish, resume, and before the resume the comparison that `weight_check` makes;
each step has a limit. Requests in flight freeze and go on with the new weights; from then on every token they get
carries the version string.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls, version_name, within
from harness_trainer.learner.sync_config import VerifySync
from harness_trainer.learner.weight_check import WeightCheck

if TYPE_CHECKING:
    import torch

__all__ = ["ShmWeightTransfer", "version_name"]

logger = logging.getLogger(__name__)

_SPARE_BYTES = 16 * 2**20  # left free beside the weights: the header, and whoever shares the disk
# Part of the engine's error text when a refused update left its weights alone (`engine.shm_engine.WEIGHTS_UNCHANGED`;
# that module can be imported only beside vLLM).
_UNCHANGED = "the weights are unchanged"


class ShmWeightTransfer:
    """TRL's `WeightTransferProtocol` over a file that trainer and engine both see.

    With `keep_dir`, the weights of every published version stay there as `v<n>.safetensors` (a tied head is in it once,
    as the embedding). Errors are TrainingFailed with the engine's own text; by then the half-open update is closed and
    the engine resumed, or the message says that it was not.
    """

    def __init__(
        self,
        base_url: str,
        *,
        directory: Path = Path("/dev/shm"),
        keep_dir: Path | None = None,
        fallback_dir: Path | None = None,
        verify: VerifySync = "never",
        announce: Callable[[int], None] = lambda version: None,
        control_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        write_timeout_s: float = 600.0,
        cleanup_timeout_s: float = 10.0,
    ) -> None:
        """`directory` holds one update at a time; whoever made it removes it when this process was killed.

        `fallback_dir` (None = none) is used, with a warning, when `directory` is too small; whoever names it has
        `remove_unsent` look there too, and the engine must see both under the same path. `announce` is told each
        version before the engine can sample under its name. Seconds: `control_timeout_s` per pause, resume or version
        call, `load_timeout_s` for the engine to load a file, `write_timeout_s` to gather and write one,
        `cleanup_timeout_s` per call while cleaning up after a failure.
        """
        self.keep_dir = keep_dir
        self.last_timings: dict[str, float] = {}  # seconds: write, pause, load, verify, resume of the latest sync
        self._directory = directory
        self._folders = [directory, *([fallback_dir] if fallback_dir else [])]
        self._announce = announce
        self._load_s = load_timeout_s
        self._write_s = write_timeout_s
        self._engine = EngineCalls(base_url, control_timeout_s=control_timeout_s, cleanup_timeout_s=cleanup_timeout_s)
        self.check = WeightCheck(self._engine, verify)
        self._version: int | None = None
        self._update_sent = False  # of the sync under way: the engine may hold some of the new weights

    def next_version(self, version: int) -> None:
        """Say which policy version the next `send_weights` publishes. Call it before each sync."""
        self._announce(version)
        self._version = version

    def compare_next(self) -> None:
        """Have the next update compared with the engine's weights, whatever `verify` says."""
        self.check.due = True

    def init_weight_transfer(self) -> None:
        """Say hello. An engine that an earlier trainer left paused, in the middle of an update, stays paused.

        It may hold weights that have no name yet, and frozen requests would go on with them under the old one. The
        first update closes the half-open one, names the weights, and resumes.
        """
        if self.keep_dir is not None:
            self.keep_dir.mkdir(parents=True, exist_ok=True)
        self._engine.post("init_weight_transfer_engine", {"init_info": {}})

    def pause(self) -> None:
        """Nothing yet: the engine goes on sampling until the weights are written, and `send_weights` pauses it then."""
        self.last_timings = {}

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights as the version given to `next_version`.

        Raises TrainingFailed; then the engine runs again, under the old version if its weights are unchanged.
        """
        if self._version is None:
            raise TrainingFailed("next_version() must name the policy version before its weights are sent")
        version, self._version = version_name(self._version), None
        self._update_sent = False
        with self._running_again(version):
            file, names = self.write(iterator)
        try:
            self.load(file, names, version)
            self.keep(file, version)
        finally:
            file.unlink(missing_ok=True)

    def write(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> tuple[Path, list[str]]:
        """Write the weights where the engine can read them; the file, which is the caller's, and the tensors' names."""
        began = time.monotonic()
        written = within(self._write_s, "the weights were not written", lambda: self._write(iterator))
        self.last_timings["write"] = time.monotonic() - began
        return written

    def load(self, file: Path, names: list[str], version: str) -> None:
        """Have the engine take what was written. It is still paused then; on an error it runs again."""
        engine, marks = self._engine, [time.monotonic()]
        self._update_sent = False
        with self._running_again(version):
            engine.pause()
            marks.append(time.monotonic())
            self._start_update()
            self._update_sent = True
            engine.post("update_weights", {"update_info": {"path": str(file), "names": names}}, self._load_s)
            engine.post("finish_weight_update", {"weight_version": version}, self._load_s)
            engine.confirm(version)
            marks.append(time.monotonic())
            if self.check.due:
                self.check.run()
            marks.append(time.monotonic())
        self.last_timings |= {step: marks[i + 1] - marks[i] for i, step in enumerate(("pause", "load", "verify"))}

    def keep(self, file: Path, version: str) -> None:
        """Put the file by under the version's name, where that is wanted."""
        if self.keep_dir is not None:
            with self._running_again(version):
                os.replace(file, self.keep_dir / f"{version}.safetensors")

    @contextlib.contextmanager
    def _running_again(self, version: str) -> Iterator[None]:
        """Whatever fails, the engine samples again. Raises TrainingFailed for every error."""
        try:
            yield
        except Exception as error:
            unchanged = not self._update_sent or _UNCHANGED in str(error)
            left = self._engine.recover(None if unchanged else version)
            raise TrainingFailed(f"sending weights {version} failed: {error}{left}") from error
        except BaseException:
            self._engine.recover(version if self._update_sent else None)
            raise

    def resume(self) -> None:
        began = time.monotonic()
        self._engine.resume()
        self.last_timings["resume"] = time.monotonic() - began

    def destroy(self) -> None:
        """Close the connection; idempotent. No file is left: each is gone when its update ends."""
        self._engine.close()

    def _start_update(self) -> None:
        try:
            self._engine.post("start_weight_update")
        except TrainingFailed as error:
            if "already active" not in str(error):
                raise
            logger.warning("the engine held a half-open weight update; closing it")
            self._engine.close_update()
            self._engine.post("start_weight_update")

    def _write(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> tuple[Path, list[str]]:
        """Write the weights where the engine can read them; answer the file and the tensors' names."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = dict(_distinct(iterator))
        if not tensors:
            raise TrainingFailed("the trainer has no weights to send")
        self.check.remember(tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        file = self._place(size) / f"weights-{secrets.token_hex(8)}.safetensors"
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            file.unlink(missing_ok=True)
            raise TrainingFailed(f"the weights cannot be written to {file.parent}: {error}") from None
        return file, list(tensors)

    def _place(self, size: int) -> Path:
        """A folder with room for `size` bytes. Kept weights are written where they stay: no second copy."""
        if self.keep_dir is not None:
            if _free_bytes(self.keep_dir) < size + _SPARE_BYTES:
                raise TrainingFailed(f"{self.keep_dir} has no room for {size / 2**20:.0f} MiB of weights; free space")
            return self.keep_dir
        for folder in self._folders:
            if _free_bytes(folder) >= size + _SPARE_BYTES:
                if folder != self._directory:
                    logger.warning("%s has no room for the weights; using %s, which is slower", self._directory, folder)
                return folder
        room = f"room for {size / 2**20:.0f} MiB of weights"
        raise TrainingFailed(f"{' and '.join(map(str, self._folders))} have no {room}; free space")


def remove_unsent(directory: Path) -> None:
    """Remove what a trainer that was killed left of its last update. Nobody else may be sending from there."""
    for file in directory.glob("weights-*.safetensors"):
        file.unlink(missing_ok=True)


def _distinct(iterator: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Contiguous CPU tensors of which no two share memory, as safetensors wants them."""
    seen: set[int] = set()
    for name, tensor in iterator:
        plain = tensor.detach().to("cpu").contiguous()
        pointer = plain.untyped_storage().data_ptr()
        is_part = plain.untyped_storage().nbytes() > plain.nbytes  # one of stacked experts would keep the whole stack
        yield name, plain.clone() if is_part or pointer in seen else plain
        seen.add(pointer)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0  # no such folder: no room there
