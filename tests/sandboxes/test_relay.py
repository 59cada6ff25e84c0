"""The relay passes bytes on as they come, ends as its two sides end, and survives whatever is missing."""

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes import relay as relay_module
from sandboxes.relay import Relay, SocketBridge

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.[89].*/bin/python"))


@pytest.fixture
def folder() -> Path:
    """Short: a socket's path has at most 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="relay-") as name:
        yield Path(name)


@contextlib.asynccontextmanager
async def service(path: Path, handler: Handler, **options: int) -> AsyncIterator[None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(handle, path, **options)
    try:
        yield
    finally:
        server.close()
        os.unlink(path)


@contextlib.asynccontextmanager
async def relayed(target: relay_module.Target, **options: int) -> AsyncIterator[int]:
    """A relay on a free port of loopback; gives the port."""
    relay = Relay(target, **options)
    server = await asyncio.get_running_loop().create_server(relay.accept, "127.0.0.1", 0, backlog=4096)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await relay.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection, orderly or not, without a byte."""
    async with asyncio.timeout(2):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_each_piece_passes_at_once_in_both_directions(folder: Path) -> None:
    async with service(folder / "s", echo), relayed(str(folder / "s")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (b"data: 1\n\n", b"\x00" * 10, b"x"):
            writer.write(piece)
            async with asyncio.timeout(1):
                assert await reader.readexactly(len(piece)) == piece
        writer.close()


async def test_a_client_that_has_said_all_still_gets_the_answer(folder: Path) -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.read()
        writer.write(b"you said %d bytes" % len(said))
        await writer.drain()

    async with service(folder / "s", answer_at_the_end), relayed(str(folder / "s")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"y" * 300_000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 2) == b"you said 300000 bytes"
        writer.close()


async def test_a_service_that_has_said_all_still_hears(folder: Path) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def speak_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.write_eof()
        heard.set_result(await reader.read())

    async with service(folder / "s", speak_first), relayed(str(folder / "s")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 2) == b"bye"
        writer.write(b"late words")
        writer.write_eof()
        assert await asyncio.wait_for(heard, 2) == b"late words"
        writer.close()


async def test_a_missing_socket_closes_at_once_and_its_return_is_seen(folder: Path) -> None:
    async with relayed(str(folder / "s")) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await closed(reader)
            writer.close()
        for _ in range(2):  # the second socket is a new file, as after a restart
            async with service(folder / "s", echo):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"there")
                assert await asyncio.wait_for(reader.readexactly(5), 2) == b"there"
                writer.close()


async def test_a_socket_file_that_nobody_listens_on_closes_at_once(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
    async with relayed(str(folder / "s")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await closed(reader)
        writer.close()


async def test_a_reset_is_passed_on_as_a_reset(folder: Path) -> None:
    """An answer that broke off must not look like a whole one."""
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        async with relayed(upstream.getsockname()[:2]) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            accepted, _ = await asyncio.to_thread(upstream.accept)
            accepted.sendall(b"half of it")
            assert await asyncio.wait_for(reader.readexactly(10), 2) == b"half of it"
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 2)
            writer.close()


async def test_an_agent_that_was_killed_is_noticed_by_the_service(folder: Path) -> None:
    gone = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        try:
            await reader.read()
        finally:
            gone.set()

    async with service(folder / "s", wait_for_the_end), relayed(str(folder / "s")) as port:
        client = socket.create_connection(("127.0.0.1", port))
        assert await asyncio.to_thread(client.recv, 5) == b"hello"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await asyncio.wait_for(gone.wait(), 2)


async def test_a_killed_relay_is_noticed_on_both_sides(folder: Path) -> None:
    """A service that waits on for an agent which can no more be answered would hold that agent's next try up."""
    gone = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        try:
            await reader.read()
        finally:
            gone.set()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with service(folder / "s", wait_for_the_end):
        pair = f"127.0.0.1:{port}={folder}/s"
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", relay_module.__file__, pair)
        try:
            reader, writer = await _connected_soon(port)
            writer.write(b"hello")
            assert await asyncio.wait_for(reader.readexactly(5), 2) == b"hello"
        finally:
            process.kill()
        assert await closed(reader)
        await asyncio.wait_for(gone.wait(), 2)
        await process.wait()
        writer.close()


async def _connected_soon(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


async def test_a_slow_reader_stops_the_sender_and_loses_nothing(folder: Path) -> None:
    sent = 0
    total = 64 * 2**20

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        piece = bytes(range(256)) * 256
        while sent < total:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with service(folder / "s", pour), relayed(str(folder / "s")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        last = -1
        while last != sent:  # until nothing moves any more
            last = sent
            await asyncio.sleep(0.1)
        assert sent < 16 * 2**20, "the relay took in what nobody read"
        got, expected = 0, 0
        while data := await asyncio.wait_for(reader.read(1 << 20), 5):
            assert data[0] == expected and (len(data) < 2 or data[1] == (expected + 1) % 256)
            got += len(data)
            expected = got % 256
        assert got == total
        writer.close()


async def test_two_thousand_connections_at_once(folder: Path) -> None:
    """Also: more than the service's queue of connections holds, which a Unix socket answers with "try again"."""

    async def once(port: int, number: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        word = b"%05d" % number
        writer.write(word)
        answer = await reader.readexactly(5)
        held.append(writer)
        return answer == word

    held: list[asyncio.StreamWriter] = []
    async with service(folder / "s", echo, backlog=5), relayed(str(folder / "s")) as port:
        async with asyncio.timeout(60):
            assert all(await asyncio.gather(*(once(port, number) for number in range(2000))))
        assert len(held) == 2000
        for writer in held:
            writer.close()


async def test_connections_above_the_bound_are_closed_and_the_others_live(folder: Path) -> None:
    async with service(folder / "s", echo), relayed(str(folder / "s"), max_connections=3) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in kept:
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await closed(reader)
        writer.close()
        kept[0][1].close()
        reader, writer = kept[1]
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        async with asyncio.timeout(2):
            while True:  # room again, once the relay has seen that one left
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"c")
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    assert await reader.readexactly(1) == b"c"
                    break
        for _, end in [*kept[1:], (reader, writer)]:
            end.close()


async def test_a_bridge_offers_a_port_as_a_socket_that_everybody_may_use(folder: Path) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    path = folder / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as stale:  # of a bridge that was killed
        stale.bind(str(path))
    async with server:
        async with SocketBridge(path, server.sockets[0].getsockname()[:2]):
            assert path.stat().st_mode & 0o777 == 0o666
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"through")
            assert await asyncio.wait_for(reader.readexactly(7), 2) == b"through"
        assert await closed(reader), "the end of the bridge is the end of its connections"
        writer.close()
        assert not path.exists()


async def test_a_bridge_to_nowhere_closes_at_once(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with SocketBridge(folder / "b", ("127.0.0.1", port)):
        reader, writer = await asyncio.open_unix_connection(folder / "b")
        assert await closed(reader)
        writer.close()


async def test_closing_while_it_dials_leaves_no_task(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(folder / "s"))
        full.listen(0)
        filling = socket.socket(socket.AF_UNIX)
        filling.connect(str(folder / "s"))  # the queue is full now: dialling has to wait
        before = asyncio.all_tasks()
        async with relayed(str(folder / "s")) as port:
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == before
        for reader, writer in clients:
            assert await closed(reader)
            writer.close()
        filling.close()


@pytest.mark.parametrize("python", [sys.executable, *map(str, OLD_PYTHONS)], ids=lambda path: path.split("/")[-3])
async def test_the_file_alone_serves_several_pairs_and_announces_itself(python: str, folder: Path) -> None:
    alone = folder / "relay.py"
    shutil.copy(relay_module.__file__, alone)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
    announced: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    ended = asyncio.Event()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"me\n"
        announced.put_nowait((reader, writer))
        await ended.wait()

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read(10)).upper())

    pairs = [f"127.0.0.1:{ports[0]}={folder}/a", f"127.0.0.1:{ports[1]}={folder}/b"]
    command = [python, "-I", str(alone), *pairs, "--announce", str(folder / "c"), "me"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with service(folder / "a", echo), service(folder / "b", shout):
            announced_before = False
            for _ in range(2):  # whoever listens there may be another one later
                async with service(folder / "c", attend):
                    told, connection = await asyncio.wait_for(announced.get(), 10)
                    if not announced_before:
                        connection.close()
                    announced_before = True
            for port, answer in zip(ports, (b"hi", b"HI"), strict=True):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"hi")
                assert await asyncio.wait_for(reader.readexactly(2), 2) == answer
                writer.close()
    finally:
        process.terminate()
        assert await process.wait() == 0
        ended.set()
    assert await closed(told), "its end is seen by whoever it announced itself to"


@pytest.mark.parametrize("pair", ["", "8101=/x", "127.0.0.1:x=/x", "127.0.0.1:1=relative", "127.0.0.1:1"])
def test_a_pair_that_makes_no_sense_is_refused_in_a_line(pair: str) -> None:
    done = subprocess.run([sys.executable, relay_module.__file__, pair], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and "HOST:PORT=/PATH" in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_in_a_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        pair = f"127.0.0.1:{taken.getsockname()[1]}={folder}/s"
        done = subprocess.run([sys.executable, relay_module.__file__, pair], capture_output=True, text=True, timeout=10)
    assert done.returncode == 1 and done.stderr.startswith("relay: ") and "Traceback" not in done.stderr
