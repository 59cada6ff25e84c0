"""Compressed request bodies: the same turn whatever the encoding, an error in the dialect's shape otherwise."""

import gzip
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import zstandard

from capture_proxy.engines.scripted import ScriptedEngine
from tests.capture.serving import served

CHAT = "/v1/chat/completions"
PLAIN = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 200}]}).encode()


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def unsized_zstd(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


GOOD = {
    "identity": ("identity", PLAIN),
    "gzip": ("gzip", gzip.compress(PLAIN)),
    "x-gzip, upper case": ("X-GZIP", gzip.compress(PLAIN)),
    "gzip in two members": ("gzip", gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])),
    "deflate": ("deflate", zlib.compress(PLAIN)),
    "deflate without its header": ("deflate", raw_deflate(PLAIN)),
    "zstd": ("zstd", zstandard.compress(PLAIN)),
    "zstd of unknown size": ("zstd", unsized_zstd(PLAIN)),
    "zstd in two frames": ("zstd", zstandard.compress(PLAIN[:100]) + zstandard.compress(PLAIN[100:])),
    "one after the other": ("gzip, zstd", zstandard.compress(gzip.compress(PLAIN))),
    "nothing at all": ("", PLAIN),
}


async def test_every_encoding_gives_the_same_turn(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            for name, (encoding, body) in GOOD.items():
                response = await http.post(CHAT, content=body, headers={"content-encoding": encoding})
                assert response.status_code == 200, name
        turns = (await gw.admin.capture("s1")).turns
    assert len(turns) == len(GOOD)
    assert all(turn.request == turns[0].request and turn.prompt_ids_P == turns[0].prompt_ids_P for turn in turns)
    assert len({turn.body_hash for turn in turns}) == 1  # a retry may be compressed otherwise


ZSTD, GZIP = zstandard.compress(PLAIN), gzip.compress(PLAIN)
BAD = {
    "unknown": ("foo", PLAIN, 415),
    "one unknown of two": ("gzip, br", GZIP, 415),
    "too many": ("gzip, gzip, gzip, gzip", GZIP, 415),
    "no gzip": ("gzip", b"garbage", 400),
    "no zstd": ("zstd", PLAIN, 400),
    "no deflate": ("deflate", b"\xff" * 50, 400),
    "empty gzip": ("gzip", b"", 400),
    "empty zstd": ("zstd", b"", 400),
    "gzip with a broken checksum": ("gzip", GZIP[:-6] + b"\0\0" + GZIP[-4:], 400),
    "garbage after gzip": ("gzip", GZIP + b"more", 400),
    "garbage after zstd": ("zstd", ZSTD + b"more", 400),
    "garbage after deflate": ("deflate", zlib.compress(PLAIN) + b"more", 400),
    "large": ("identity", b" " * 100_001, 413),
    "large once decompressed": ("gzip", gzip.compress(bytes(50_000_000)), 413),
    "large once decompressed, zstd": ("zstd", zstandard.compress(bytes(50_000_000)), 413),
    "large in between": ("gzip, gzip", gzip.compress(gzip.compress(bytes(50_000_000)) * 20), 413),
}
for _encoding, _whole in (("gzip", GZIP), ("zstd", ZSTD), ("deflate", zlib.compress(PLAIN))):
    for _cut in (1, 4, len(_whole) // 2, len(_whole) - 1):
        BAD[f"{_encoding} cut at {_cut}"] = (_encoding, _whole[:_cut], 400)


async def test_what_cannot_be_decoded_is_an_error_in_the_dialects_shape(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"])
    async with served(engine, tmp_path / "s.sqlite", max_body=100_000) as gw:
        async with gw.http(await gw.mint()) as http:
            for name, (encoding, body, status) in BAD.items():
                response = await http.post(CHAT, content=body, headers={"content-encoding": encoding})
                assert response.status_code == status, name
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}, name
            assert (await http.post(CHAT, content=PLAIN)).status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize("encoding", ["zstd", "zstd, zstd", "gzip", "deflate"])
def test_a_bomb_takes_no_more_memory_than_the_limit(tmp_path: Path, encoding: str) -> None:
    """In a process of its own, whose peak of memory is its own: a GiB in some KiB, or in 50 bytes."""
    script = tmp_path / "bomb.py"
    script.write_text(
        f"""
import gzip, resource, zlib, zstandard
from capture_proxy.bodies import _decoded, _encodings
from capture_proxy.errors import BodyTooLarge
block = bytes(2**20)
stream = {{"zstd": zstandard.ZstdCompressor().compressobj(), "gzip": zlib.compressobj(wbits=31),
          "deflate": zlib.compressobj()}}[{encoding!r}.split(",")[0]]
body = b"".join(stream.compress(block) for _ in range(2**10)) + stream.flush()
names = _encodings({encoding!r})
if len(names) > 1:
    body = zstandard.compress(body)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for name in reversed(names):
        body = _decoded(body, name, 2**24)
    print("decoded")
except BodyTooLarge:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert int(done.stdout) < 96 * 1024, done.stdout  # KiB; the limit is 16 MiB


async def test_a_stranger_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        async with gw.http() as http:
            response = await http.post(CHAT, content=b"garbage", headers={"content-encoding": "gzip"})
    assert response.status_code == 401
