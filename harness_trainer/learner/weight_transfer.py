"""Weight transfer by file, on the trainer's side: write the policy, tell the engine, name the new version.

Owns the file, the HTTP calls around it and their time limits, and that the engine samples again whatever goes wrong.
Loading is the engine's part (`engine.shm_engine`). TRL's trainer calls `ShmWeightTransfer` through its
`WeightTransferProtocol`; the learner calls `next_version` before each sync and reads `last_timings` after it.

A sync is write, pause, start, update, finish, resume. Requests in flight freeze and go on with the new
weights; from then on every token they get carries the version string.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from harness_trainer.errors import TrainingFailed

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SPARE_BYTES = 16 * 2**20  # left free beside the weights: the header, and whoever shares the disk
# Part of the engine's error text when a refused update left its weights alone (`engine.shm_engine.WEIGHTS_UNCHANGED`;
# that module can be imported only beside vLLM).
_UNCHANGED = "the weights are unchanged"


def version_name(version: int) -> str:
    """The engine's name for policy `version`, as it comes back on every token. Example: version_name(3) == "v3"."""
    return f"v{version}"


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
        control_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        cleanup_timeout_s: float = 10.0,
    ) -> None:
        """`directory` holds one update at a time; whoever made it removes it when this process was killed.

        `fallback_dir` (None = the temp folder) is used, with a warning, when `directory` is too small. Seconds:
        `control_timeout_s` per pause, resume or version call, `load_timeout_s` for the engine to load a file,
        `cleanup_timeout_s` per call while cleaning up after a failure.
        """
        self.keep_dir = keep_dir
        self.last_timings: dict[str, float] = {}  # seconds: write, pause, load, resume of the latest sync
        self._directory = directory
        self._fallback_dir = fallback_dir or Path(tempfile.gettempdir())
        self._control_s = control_timeout_s
        self._load_s = load_timeout_s
        self._cleanup_s = cleanup_timeout_s
        # The engine is beside us: a proxy from the environment must not come between. A connection per call, because
        # vLLM closes one without a word after it answered with an error.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=base_url, trust_env=False, limits=limits)
        self._version: int | None = None

    def next_version(self, version: int) -> None:
        """Say which policy version the next `send_weights` publishes. Call it before each sync."""
        self._version = version

    def init_weight_transfer(self) -> None:
        """Say hello, and free an engine that an earlier trainer left paused. A half-open update ends with the next."""
        if self.keep_dir is not None:
            self.keep_dir.mkdir(parents=True, exist_ok=True)
        self._call("init_weight_transfer_engine", {"init_info": {}}, self._control_s)
        self._call("resume", None, self._control_s)

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
        file: Path | None = None
        update_sent = False
        try:
            began = time.monotonic()
            file, names = self._write(iterator)
            written = time.monotonic()
            # "keep" freezes requests in flight instead of aborting them. Their keys and values are dropped with all
            # others and computed anew, so each later token is exactly of the new policy, whatever came before it.
            self._call("pause?mode=keep&clear_cache=true", None, self._control_s)
            paused = time.monotonic()
            self._start_update()
            update_sent = True
            self._call("update_weights", {"update_info": {"path": str(file), "names": names}}, self._load_s)
            self._call("finish_weight_update", {"weight_version": version}, self._load_s)
            self._confirm(version)
            self.last_timings |= {
                "write": written - began,
                "pause": paused - written,
                "load": time.monotonic() - paused,
            }
            if self.keep_dir is not None:
                os.replace(file, self.keep_dir / f"{version}.safetensors")
        except Exception as error:
            unchanged = not update_sent or _UNCHANGED in str(error)
            left = self._recover(None if unchanged else version)
            raise TrainingFailed(f"sending weights {version} failed: {error}{left}") from error
        except BaseException:
            self._recover(version if update_sent else None)
            raise
        finally:
            if file is not None:
                file.unlink(missing_ok=True)

    def resume(self) -> None:
        began = time.monotonic()
        try:
            self._call("resume", None, self._control_s)
        except Exception as error:
            raise TrainingFailed(f"resuming the engine failed: {error}{self._recover()}") from error
        self.last_timings["resume"] = time.monotonic() - began

    def destroy(self) -> None:
        """Close the connection; idempotent. No file is left: each is gone when its update ends."""
        self._client.close()

    def _start_update(self) -> None:
        try:
            self._call("start_weight_update", None, self._control_s)
        except TrainingFailed as error:
            if "already active" not in str(error):
                raise
            logger.warning("the engine held a half-open weight update; closing it")
            self._close_update()
            self._call("start_weight_update", None, self._control_s)

    def _confirm(self, version: str) -> None:
        got = self._call("weight_info", None, self._control_s, method="GET").get("weight_version")
        if got != version:
            raise TrainingFailed(f"the engine says its weights are {got!r} after {version!r} was published")

    def _recover(self, half_sent: str | None = None) -> str:
        """Bring the engine back to sampling; answer what a person must know if that failed, else "".

        `half_sent` is a version that may have been loaded in part: tokens sampled from here on may be of two policies,
        so they get a version of their own that nothing is trained on.
        """
        self._close_update()
        try:
            if half_sent is not None:
                self._call("update_weight_version", {"new_version": f"{half_sent}-partial"}, self._cleanup_s)
            self._call("resume", None, self._cleanup_s)
        except TrainingFailed as failure:
            return f"; the engine may still be paused ({failure}), restart it"
        return ""

    def _close_update(self) -> None:
        """End an update that may be open; the engine's complaint that none was is what we want to hear."""
        with contextlib.suppress(TrainingFailed):
            self._call("finish_weight_update", None, self._cleanup_s)

    def _call(self, path: str, body: dict[str, Any] | None, limit_s: float, method: str = "POST") -> dict[str, Any]:
        """One engine call, at most `limit_s`. Raises TrainingFailed with the engine's own text."""
        name = path.partition("?")[0]
        try:
            response = self._client.request(method, f"/{path}", json=body, timeout=httpx.Timeout(limit_s, connect=5.0))
        except httpx.TimeoutException:
            raise TrainingFailed(f"the engine did not answer /{name} within {limit_s:g} s") from None
        except httpx.HTTPError as error:
            raise TrainingFailed(f"the engine cannot be reached for /{name}: {error}") from None
        if response.status_code != 200:
            raise TrainingFailed(f"the engine answered /{name} with {response.status_code}: {_error_text(response)}")
        try:
            answer = response.json()
        except ValueError:
            raise TrainingFailed(f"the engine answered /{name} with something that is not JSON") from None
        return answer if isinstance(answer, dict) else {}

    def _write(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> tuple[Path, list[str]]:
        """Write the weights where the engine can read them; answer the file and the tensors' names."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = dict(_distinct(iterator))
        if not tensors:
            raise TrainingFailed("the trainer has no weights to send")
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
        for folder in (self._directory, self._fallback_dir):
            if _free_bytes(folder) >= size + _SPARE_BYTES:
                if folder != self._directory:
                    logger.warning("%s has no room for the weights; using %s, which is slower", self._directory, folder)
                return folder
        room = f"room for {size / 2**20:.0f} MiB of weights"
        raise TrainingFailed(f"neither {self._directory} nor {self._fallback_dir} has {room}; free space")


def _distinct(iterator: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Contiguous CPU tensors of which no two share memory, as safetensors wants them."""
    seen: set[int] = set()
    for name, tensor in iterator:
        plain = tensor.detach().to("cpu").contiguous()
        pointer = plain.untyped_storage().data_ptr()
        yield name, plain.clone() if pointer in seen else plain
        seen.add(pointer)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0  # no such folder: no room there


def _error_text(response: httpx.Response) -> str:
    """The engine's message: vLLM answers `{"error": {"message"}}`, `{"error": text}` or `{"detail": text}`."""
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:500] or "no text"
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return (text if isinstance(text, str) else json.dumps(text)).strip()[:500]
