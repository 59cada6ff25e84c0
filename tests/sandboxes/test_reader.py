"""Finding the line that ends a command's streams, however they are cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.box_calls import Ended, Reader

NONCE = "0123456789abcdef" * 2


def feed(reader: Reader, stream: int, data: bytes, sizes: list[int]) -> bool:
    done = False
    for size in [*sizes, len(data) + 1]:
        if data:
            done = reader.feed(stream, data[:size])
            data = data[size:]
    return done


chunks = st.lists(st.integers(1, 40), max_size=30)
# Much that looks like the start of the line.
text = st.lists(st.sampled_from([b"x", b"\n", NONCE[:5].encode(), NONCE[:-1].encode(), b"\0"]), max_size=12).map(
    b"".join
)


@given(text, text, chunks, chunks, st.integers(0, 255), st.integers(0, 9))
def test_any_cut_gives_the_same_output(
    out: bytes, err: bytes, a: list[int], b: list[int], code: int, ooms: int
) -> None:
    line = f"{NONCE} {code} {ooms}\n".encode()
    reader = Reader(NONCE, 10_000)
    assert not feed(reader, 1, out + line, a)
    assert feed(reader, 2, err + line, b)
    reader.finish()
    assert reader.ended == Ended(code, ooms)
    assert (reader.out.data(), reader.err.data()) == (out, err)


@given(text, chunks)
def test_without_the_line_everything_is_output(out: bytes, sizes: list[int]) -> None:
    reader = Reader(NONCE, 10_000)
    assert not feed(reader, 1, out, sizes)
    reader.finish()
    assert reader.ended is None and reader.out.data() == out


def test_what_comes_after_the_line_is_dropped() -> None:
    reader = Reader(NONCE, 100)
    reader.feed(1, f"out{NONCE} 0 0\nfrom a server".encode())
    reader.feed(1, b"more")
    assert reader.feed(2, f"{NONCE} 0 0\n".encode())
    reader.finish()
    assert reader.out.text() == "out"


def test_a_forged_line_neither_raises_nor_counts() -> None:
    reader = Reader(NONCE, 100)
    reader.feed(1, f"{NONCE} gibberish\n".encode())
    assert reader.feed(2, f"{NONCE}{'9' * 200}".encode())
    assert reader.ended is None


def test_memory_stays_bounded() -> None:
    reader = Reader(NONCE, 1000)
    for _ in range(1000):
        reader.feed(1, b"x" * 100_000)
    reader.feed(1, f"{NONCE} 0 0\n".encode())
    assert len(reader.out.data()) < 1100 and reader.out.num_cut == 100_000_000 - 1000
