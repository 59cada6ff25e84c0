"""Server-sent events, however they are spelled and wherever they are cut."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_proxy.engines.wire import EventParser

STREAMS = {
    "plain": (b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n', [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "cr": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "no space": (b"data:a\n\n", [b"a"]),
    "several lines": (b"data: a\ndata: b\n\ndata: c\n\n", [b"a\nb", b"c"]),
    "other fields": (b": hello\nevent: x\nid: 3\nretry: 5\ndata: a\n\n: bye\n\n", [b"a"]),
    "blank lines": (b"\n\n\n\ndata: a\n\n\n\n\n", [b"a"]),
    "no blank line at the end": (b"data: a\n\ndata: b\n", [b"a", b"b"]),
    "no line end at the end": (b"data: a\n\ndata: [DONE]", [b"a", b"[DONE]"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "utf-8": ("data: ☃é\n\n".encode(), ["☃é".encode()]),
    "nothing": (b"", []),
    "data in a name": (b"database: a\n\ndata: b\n\n", [b"b"]),
}


def parse(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.end()


@pytest.mark.parametrize("name", STREAMS)
def test_every_spelling_cut_at_every_byte_gives_the_same_events(name: str) -> None:
    stream, events = STREAMS[name]
    assert parse(stream) == events
    for cut in range(len(stream) + 1):
        assert parse(stream[:cut], stream[cut:]) == events, cut
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)), st.data())
def test_any_events_survive_any_cuts(texts: list[str], data: st.DataObject) -> None:
    texts = [text.strip() or "x" for text in texts]
    end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    stream = b"".join(b"data: " + text.encode() + end + end for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event.decode().strip() for event in parse(*chunks)] == [text.strip() for text in texts]


def test_time_is_linear_in_the_bytes() -> None:
    def seconds(size: int) -> float:
        chunks = [b"data: ", *[b"x" * 100] * (size // 100), b"\n\n"]
        started = time.perf_counter()
        assert len(parse(*chunks)[0]) == size
        return time.perf_counter() - started

    seconds(100_000)
    small, large = min(seconds(100_000) for _ in range(5)), min(seconds(3_200_000) for _ in range(3))
    assert large < 32 * small * 6  # quadratic would be a thousand times
