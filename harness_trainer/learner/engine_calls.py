"""The engine's control endpoints, each with a limit, and the way back to a running engine from wherever a sync failed.

Owns the HTTP calls that pause, update and resume vLLM, and their errors: TrainingFailed with the engine's own text.
Which weights travel and how is `weight_transfer`'s (and its siblings'), the only callers.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from harness_trainer.errors import TrainingFailed

T = TypeVar("T")

_LATE_S = 0.5  # what a deadline waits beyond the client's own, whose message comes first


class EngineGone(TrainingFailed):
    """The engine refuses connections, or broke one off: it has died, and another one may take its place."""


def version_name(version: int) -> str:
    """The engine's name for policy `version`, as it comes back on every token. Example: version_name(3) == "v3"."""
    return f"v{version}"


def within(limit_s: float, what: str, work: Callable[[], T]) -> T:
    """Do `work`, or raise TrainingFailed after `limit_s` seconds and leave it to its own end in a daemon thread.

    A read that gets a byte now and then, a disk that hangs, a collective whose peer is gone: none has an end of its
    own.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name=what, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TrainingFailed(f"{what} within {limit_s:g} s")
    return results[0]


class EngineCalls:
    """One engine. Every method returns or raises TrainingFailed within the limit it was given."""

    def __init__(self, base_url: str, *, control_timeout_s: float, cleanup_timeout_s: float) -> None:
        self.base_url = base_url
        self.control_s = control_timeout_s
        self._cleanup_s = cleanup_timeout_s
        # The engine is beside us: a proxy from the environment must not come between. A connection per call, because
        # vLLM closes one without a word after it answered with an error.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=base_url, trust_env=False, limits=limits)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> dict[str, Any]:
        return _object(path, self._call("GET", path, None, self.control_s))

    def get_text(self, path: str) -> str:
        return self._call("GET", path, None, self.control_s).text

    def post(self, path: str, body: dict[str, Any] | None = None, limit_s: float | None = None) -> dict[str, Any]:
        """`limit_s` None = that of control calls."""
        return _object(path, self._call("POST", path, body, self.control_s if limit_s is None else limit_s))

    def post_text(self, path: str, body: dict[str, Any], limit_s: float | None = None) -> str:
        """For the endpoints that answer in plain words."""
        return self._call("POST", path, body, self.control_s if limit_s is None else limit_s).text

    def pause(self) -> None:
        """Freeze requests in flight instead of aborting them.

        Their keys and values are dropped with all others and computed anew, so that each later token is exactly of the
        new policy, whatever came before it.
        """
        self.post("pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        """Raises TrainingFailed, after a second try: an engine that stays paused hangs every agent."""
        try:
            self.post("resume")
        except Exception as error:
            raise TrainingFailed(f"resuming the engine failed: {error}{self.recover()}") from error

    def confirm(self, version: str) -> None:
        """Raises TrainingFailed unless the engine says that its weights are `version`."""
        got = self.get("weight_info").get("weight_version")
        if got != version:
            raise TrainingFailed(f"the engine says its weights are {got!r} after {version!r} was published")

    def recover(self, half_sent: str | None = None) -> str:
        """Bring the engine back to sampling; answer what a person must know if that failed, else "".

        `half_sent` is a version that may have been loaded in part: tokens sampled from here on may be of two policies,
        so they get a version of their own that nothing is trained on.
        """
        self.close_update()
        failures = []
        calls: list[tuple[str, dict[str, str] | None]] = [("resume", None)]
        if half_sent is not None:
            calls.insert(0, ("update_weight_version", {"new_version": f"{half_sent}-partial"}))
        for path, body in calls:
            try:
                self.post(path, body, self._cleanup_s)
            except TrainingFailed as failure:
                failures.append(str(failure))
                if path != "resume":  # under a name that claims too much it must not sample
                    break
        return f"; the engine may still be paused ({'; '.join(failures)}), restart it" if failures else ""

    def close_update(self) -> None:
        """End an update that may be open; the engine's complaint that none was is what we want to hear."""
        with contextlib.suppress(TrainingFailed):
            self.post("finish_weight_update", None, self._cleanup_s)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, limit_s: float) -> httpx.Response:
        name = path.partition("?")[0]
        limits = httpx.Timeout(limit_s, connect=5.0)

        def request() -> httpx.Response:
            return self._client.request(method, f"/{path}", json=body, timeout=limits)

        try:
            response = within(limit_s + _LATE_S, f"the engine did not answer /{name}", request)
        except httpx.TimeoutException:
            raise TrainingFailed(f"the engine did not answer /{name} within {limit_s:g} s") from None
        except httpx.HTTPError as error:
            raise EngineGone(f"the engine cannot be reached for /{name}: {error}") from None
        if response.status_code != 200:
            raise TrainingFailed(f"the engine answered /{name} with {response.status_code}: {_error_text(response)}")
        return response


def _object(path: str, response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object; {} when it is other JSON."""
    try:
        answer = response.json()
    except ValueError:
        name = path.partition("?")[0]
        raise TrainingFailed(f"the engine answered /{name} with something that is not JSON") from None
    return answer if isinstance(answer, dict) else {}


def answers(base_url: str, limit_s: float = 10.0) -> bool:
    """Whether an engine lives there. One that is silent may be busy; one that says it is dead (503) is about to end."""
    try:
        return httpx.get(f"{base_url}/health", timeout=limit_s, trust_env=False).status_code != 503
    except httpx.TimeoutException:
        return True
    except httpx.HTTPError:
        return False


def engine_version(base_url: str) -> str:
    """The release of vLLM that serves there, e.g. "0.32.0"; "" = it does not say."""
    calls = EngineCalls(base_url, control_timeout_s=10, cleanup_timeout_s=10)
    try:
        return str(calls.get("version").get("version", ""))
    except TrainingFailed:
        return ""  # only for the model's card; whether the engine can be trained from is asked elsewhere
    finally:
        calls.close()


def _error_text(response: httpx.Response) -> str:
    """The engine's message: vLLM answers `{"error": {"message"}}`, `{"error": text}` or `{"detail": text}`."""
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:500] or "no text"
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return (text if isinstance(text, str) else json.dumps(text)).strip()[:500]
