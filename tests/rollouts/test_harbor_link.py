"""The talk with a process in Harbor's Python: whatever goes wrong on our side, who asked gets an answer."""

import asyncio
import json
import socket

import pytest

from harness_trainer.rollouts.harbor_link import Link
from sandboxes.base import NoSuchPath, SandboxError


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (NoSuchPath("no /app/x"), "absent", "no /app/x"),
        (SandboxError("it is gone"), "failed", "it is gone"),
        (ValueError("embedded null byte"), "failed", "embedded null byte"),
        (KeyError(), "failed", "KeyError"),
    ],
)
async def test_a_call_that_fails_in_any_way_is_answered(error, kind, said):
    async def serve(_):
        raise error

    ours, theirs = socket.socketpair()
    link = await Link.open(ours, {}, serve)
    reader, writer = await asyncio.open_connection(sock=theirs)
    async with asyncio.timeout(5):
        await reader.readline()  # the order
        writer.write(b'{"call": 1, "op": "exec"}\n')
        assert json.loads(await reader.readline()) == {"answer": 1, "error": said, "kind": kind}
    await link.close()
    writer.close()
    await writer.wait_closed()
