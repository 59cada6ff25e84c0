"""Errors of the capture proxy, one per boundary that was crossed, and the HTTP status each one means.

Owns which status a failure gets; `gateway` sends it in the dialect's own shape. No foreign exception
(aiohttp, httpx, sqlite3, json, ...) leaves a room: it is mapped here at the edge it crossed.
"""

from __future__ import annotations


class CaptureError(Exception):
    """Base of all errors of this package. `status` is the HTTP status, `code` the machine-readable kind."""

    status = 500
    code = "capture_error"


class BadRequest(CaptureError):
    """The agent sent something that no retry will make valid."""

    status = 400
    code = "invalid_request_error"


class PromptTooLong(BadRequest):
    """The rendered prompt leaves no room for output in the model's window; the rollout is truncated.

    Agents read the two lengths (tokens) out of their dialect's own sentence to decide how much to drop; None = unknown.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, num_tokens: int | None = None, max_tokens: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class PreviousResponseNotFound(BadRequest):
    """The request goes on from a reply that this session does not have (unknown, foreign, failed, or not stored)."""

    code = "previous_response_not_found"


class UnknownSession(CaptureError):
    """No session has this token."""

    status = 401
    code = "invalid_api_key"


class NotFound(CaptureError):
    """No such path, model, or (on the admin port) session."""

    status = 404
    code = "not_found"


class SessionClosed(CaptureError):
    """The session is sealed, or a limit of it is spent. 403 ends most agents at once; a policy may choose another.

    `limit` is what `Session.limit_hit` says, or "sealed".
    """

    status = 403
    code = "session_closed"

    def __init__(self, message: str, limit: str = "sealed", status: int = 403) -> None:
        super().__init__(message)
        self.limit, self.status = limit, status


class UnsupportedEncoding(CaptureError):
    """Content-Encoding is not one we decode."""

    status = 415
    code = "unsupported_content_encoding"


class BodyTooLarge(CaptureError):
    """The request body, after decompression, exceeds the limit."""

    status = 413
    code = "request_too_large"


class EngineError(CaptureError):
    """The engine answered with an error, or with something that is not its protocol."""

    status = 502
    code = "engine_error"


class EngineUnreachable(EngineError):
    """No connection to the engine, or it went away in the middle of a reply."""

    status = 503
    code = "engine_unreachable"


class StoreError(CaptureError):
    """The store could not keep a turn (disk full, schema of a newer version, ...). Nothing is acknowledged."""

    status = 507
    code = "store_error"


class FamilyError(CaptureError):
    """No renderer for the model's family can be had, or it cannot do what was asked. Never reaches an agent."""

    code = "renderer_error"
