"""The trainer's client when a whole run's sessions are asked for at once."""

import asyncio

from capture_proxy.admin_client import AdminClient

ANSWER = b'{"session_id": "s"}'


async def test_hundreds_of_calls_at_once_take_turns_and_all_are_answered():
    num_open = most = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, most
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            num_open += 1
            most = max(most, num_open)
            await asyncio.sleep(0.001)
            num_open -= 1
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n"
            writer.write(head.encode() + ANSWER)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, AdminClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key") as admin:
        found = await asyncio.gather(*(admin.stats() for _ in range(200)))
    assert found == [{"session_id": "s"}] * 200
    assert 1 < most <= 32, "more waiting in httpx's pool cost the square of their number"
