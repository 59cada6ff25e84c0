"""Ends of asyncio's child processes."""

from __future__ import annotations

import asyncio


async def ended(process: asyncio.subprocess.Process) -> int:
    """Wait for the process, then close its pipes; gives the exit code.

    `wait` alone may return while a pipe is still open (its end was not read yet, or a child of the process holds it).
    A loop that closes just then leaves the transport to the garbage collector, which fails in whatever test runs next.
    """
    code = await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way
    return code
