"""An engine that costs nothing: vLLM's chat, render, generate and derender routes, answered from bytes made before.

    python -m benchmarks.capture_upstream [--prompt-tokens 2000] [--tokens 100] [--interval-ms 1]
        [--stamped [--in-step]]

A program of its own, so that its time is nobody else's. Prints its URL. Each prompt ends in an id of its own. A request
that says "paced" gets its first chunk at once and the others `--interval-ms` apart (if it does not stream: all of it
when a stream would have ended), any other gets everything at once. With `--stamped` every stream is paced, and each of
its chunks says when it left; `--in-step` sends those of all streams at the same moments, as an engine's batch does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from typing import cast

import httptools
import uvloop

CHAT = b"/v1/chat/completions"
GENERATE = b"/inference/v1/generate"
SENT_AT = b"@" * 17  # where a reply's text begins: when it left, seconds of the machine's monotonic clock


class Replies:
    """The bytes of every reply; `%d` stands for the id that makes a prompt one of its own."""

    def __init__(self, num_prompt: int, num_tokens: int, *, stamped: bool = False) -> None:
        self.stamped = stamped
        prompt = json.dumps([1000 + i for i in range(num_prompt - 1)])[:-1].encode() + b", %d]"
        ids = [200 + i for i in range(num_tokens)]
        text = f"sent {SENT_AT.decode()} " + "word " * num_tokens
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        spans = [{"version": "v1", "start": 0, "end": num_tokens}]
        self.models = json.dumps({"object": "list", "data": [{"id": "bench", "max_model_len": 100_000}]}).encode()
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench"}
        whole = {
            **head,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "tool_calls": []},
                    "logprobs": {"content": [_entry(i) for i in ids]},
                    "finish_reason": "stop",
                    "token_ids": ids,
                }
            ],
            "usage": usage,
        }
        self.chat = _escaped(whole)[:-1] + b', "prompt_token_ids": ' + prompt + b"}"
        chunk = {**head, "object": "chat.completion.chunk"}
        first = {**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        self.chat_head = _event(_escaped(first)[:-1] + b', "prompt_token_ids": ' + prompt + b"}")
        self.chat_chunks = [
            _event(json.dumps({**chunk, "choices": [_delta(i, last=i == ids[-1])]}).encode()) for i in ids
        ]
        self.chat_chunks = self._with_stamps(self.chat_chunks)
        self.chat_chunks.append(_event(json.dumps({**chunk, "choices": [], "usage": usage}).encode()))
        params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1000, "logprobs": 0}
        rendered = {"request_id": "r", "sampling_params": params, "model": "bench", "stream": False}
        self.rendered = _escaped(rendered)[:-1] + b', "token_ids": ' + prompt + b"}"
        self.generated = json.dumps(
            {
                "request_id": "r",
                "choices": [
                    {
                        "index": 0,
                        "text": text,
                        "token_ids": ids,
                        "logprobs": {"content": [_entry(i) for i in ids]},
                        "finish_reason": "stop",
                        "weight_versions": spans,
                    }
                ],
                "usage": usage,
            }
        ).encode()
        self.generate_chunks = [
            _event(json.dumps(_generated(i, spans if i == ids[-1] else None)).encode()) for i in ids
        ]
        self.generate_chunks = self._with_stamps(self.generate_chunks)
        self.generate_chunks.append(_event(json.dumps({"request_id": "r", "choices": [], "usage": usage}).encode()))

    def _with_stamps(self, chunks: list[bytes]) -> list[bytes]:
        num = len(chunks) if self.stamped else 1
        return [chunk.replace(b"word ", b"sent " + SENT_AT + b" word ") for chunk in chunks[:num]] + chunks[num:]


def _entry(token: int) -> dict[str, object]:
    return {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": []}


def _delta(token: int, *, last: bool) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "delta": {"content": "word "}, "token_ids": [token]}
    return {**choice, "logprobs": {"content": [_entry(token)]}, "finish_reason": "stop" if last else None}


def _generated(token: int, spans: list[dict[str, object]] | None) -> dict[str, object]:
    choice = {"index": 0, "text": "word ", "token_ids": [token], "logprobs": {"content": [_entry(token)]}}
    end = {"finish_reason": "stop", "weight_versions": spans} if spans else {}
    return {"request_id": "r", "choices": [{**choice, **end}]}


def _escaped(value: object) -> bytes:
    return json.dumps(value).replace("%", "%%").encode()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class Connection(asyncio.Protocol):
    def __init__(self, replies: Replies, interval_s: float, count: list[int], *, in_step: bool = False) -> None:
        self._replies, self._interval_s, self._count = replies, interval_s, count
        self._in_step = in_step
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url, self._body = b"", bytearray()
        self._paced = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, body = self._url, bytes(self._body)
        self._url, self._body = b"", bytearray()
        replies = self._replies
        streams = b'"stream":true' in body or b'"stream": true' in body
        self._count[0] += 1
        own = 5000 + self._count[0]
        paced = replies.stamped or b"paced" in body or (url == GENERATE and self._paced)
        self._paced = paced  # what is generated has no text: the request to render it came just before
        if url == CHAT and streams:
            self._stream([replies.chat_head % own + replies.chat_chunks[0], *replies.chat_chunks[1:]], paced)
        elif url == GENERATE and streams:
            self._stream(replies.generate_chunks, paced)
        elif url == CHAT and paced:  # what a real engine would take
            delay = len(replies.chat_chunks) * self._interval_s
            asyncio.get_running_loop().call_later(delay, self._whole, replies.chat % own)
        elif url == CHAT:
            self._whole(replies.chat % own)
        elif url == GENERATE:
            self._whole(replies.generated)
        elif url == CHAT + b"/render":
            self._whole(
                replies.rendered % own if len(body) > 2 else b'{"error": {"message": "empty", "code": 400}}',
                400 if len(body) <= 2 else 200,
            )
        elif url == b"/v1/models":
            self._whole(replies.models)
        else:
            self._whole(b"{}", 200 if url == b"/health" else 404)

    def _whole(self, body: bytes, status: int = 200) -> None:
        body = body.replace(SENT_AT, _now())
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _stream(self, chunks: list[bytes], paced: bool) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        end = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        first, *rest = [_chunk(chunk) for chunk in chunks]
        first = first.replace(SENT_AT, _now())
        if not paced:
            self._transport.write(head + first + b"".join(rest) + end)
            return
        self._transport.write(head + first)
        self._call_next(iter([*rest, end]))

    def _go_on(self, chunks: Iterator[bytes]) -> None:
        chunk = next(chunks, None)
        if chunk is not None and not self._transport.is_closing():
            self._transport.write(chunk.replace(SENT_AT, _now()) if self._replies.stamped else chunk)
            self._call_next(chunks)

    def _call_next(self, chunks: Iterator[bytes]) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._interval_s
        if self._in_step:
            wait_s -= loop.time() % wait_s
            if wait_s < self._interval_s / 2:  # the loop's clock ticks in milliseconds: this moment has just been
                wait_s += self._interval_s
        loop.call_later(wait_s, self._go_on, chunks)


def _now() -> bytes:
    return b"%017.6f" % time.monotonic()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(replies: Replies, interval_s: float, *, in_step: bool = False) -> None:
    count = [0]
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(replies, interval_s, count, in_step=in_step)

    server = await loop.create_server(connection, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--interval-ms", type=float, default=1.0)
    parser.add_argument("--stamped", action="store_true")
    parser.add_argument("--in-step", action="store_true")
    options = parser.parse_args()
    replies = Replies(options.prompt_tokens, options.tokens, stamped=options.stamped)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(replies, options.interval_ms / 1000, in_step=options.in_step))


if __name__ == "__main__":
    main()
