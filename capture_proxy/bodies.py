"""Request bodies: how many bytes are taken, and in which compression.

Owns Content-Encoding and the size limit, which holds for the bytes on the wire and after every decompression, so no
body takes more memory than that. What the bytes mean is the dialect's. Called by `gateway` and `admin`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zstandard
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from capture_proxy.errors import BadRequest, BodyTooLarge, UnsupportedEncoding

_MAX_ENCODINGS = 3  # applied one after the other; more is no client's habit
# Input given to zstd at a time: it has no bound on output, and one byte can stand for 32 KiB of it.
_ZSTD_STEP = 256
_ZSTD_WINDOW = 2**27  # bytes of history a frame may ask for; the format's own limit for streams
_KNOWN = ("gzip", "x-gzip", "deflate", "zstd")


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """The decoded request body. Raises BodyTooLarge, UnsupportedEncoding, BadRequest, starlette's ClientDisconnect."""
    encodings = _encodings(headers.get("content-encoding", ""))
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        parts.append(chunk)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    for encoding in reversed(encodings):  # the last one named was applied last
        body = _decoded(body, encoding, limit)
    return body


def _encodings(header: str) -> list[str]:
    names = [name.strip().lower() for name in header.split(",")]
    encodings = [name for name in names if name not in ("", "identity")]
    unknown = [name for name in encodings if name not in _KNOWN]
    if unknown or len(encodings) > _MAX_ENCODINGS:
        raise UnsupportedEncoding(
            f"Content-Encoding {header[:80]!r} is not supported: send identity, gzip, deflate or zstd"
        )
    return encodings


def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        for piece in _members(body, encoding, limit):
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            parts.append(piece)
    except (zlib.error, zstandard.ZstdError) as error:
        if "too much memory" in str(error):
            raise _too_large(limit) from None
        raise BadRequest(f"the body is not valid {encoding}: {error}") from None
    return b"".join(parts)


def _members(body: bytes, encoding: str, limit: int) -> Iterator[bytes]:
    """The decoded pieces of every member (gzip) or frame (zstd) of the body, none much larger than the limit."""
    step = _ZSTD_STEP if encoding == "zstd" else len(body)
    start = _starter(body, encoding)
    rest = memoryview(body)
    while True:
        stream = start()
        while rest and not stream.eof:
            chunk, rest = rest[:step], rest[step:]
            # zlib can be told how much to give; one byte more than allowed is enough to know.
            piece = stream.decompress(chunk) if encoding == "zstd" else stream.decompress(chunk, limit + 1)
            if piece:
                yield piece
        if not stream.eof:
            raise BadRequest(f"the {encoding} body is cut off")
        used = len(body) - len(rest) - len(stream.unused_data)
        rest = memoryview(body)[used:]
        if not rest:
            return
        if encoding == "deflate":
            raise BadRequest("the deflate body goes on after its end")


def _starter(body: bytes, encoding: str) -> Callable[[], Any]:
    if encoding == "zstd":
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return decompressor.decompressobj
    if encoding != "deflate":
        return lambda: zlib.decompressobj(wbits=31)
    # "deflate" means zlib's format, and some clients send it without that format's two bytes of header.
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return lambda: zlib.decompressobj(wbits=15 if has_header else -15)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes")
