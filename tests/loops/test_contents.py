"""What a tool returned, as the model is told it."""

from __future__ import annotations

import pytest

from harness_trainer.loops.contents import as_content, bounded, error_content


class Thing:
    def __str__(self):
        return "a thing"


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        ("", ""),
        (None, "None"),
        (3, "3"),
        ({"a": 1}, "{'a': 1}"),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        (Thing(), "a thing"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ([{"type": "text", "text": "a"}], [{"type": "text", "text": "a"}]),
        (
            [{"type": "image", "image": b"PNG"}],
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}}],
        ),
        (
            [{"type": "image", "image": "https://host/a.png"}],
            [{"type": "image_url", "image_url": {"url": "https://host/a.png"}}],
        ),
        ([{"type": "text", "text": "a"}, 3], "[{'type': 'text', 'text': 'a'}, 3]"),
    ],
)
def test_any_object_becomes_text_as_trl_makes_it_or_parts(value, content):
    assert as_content(value) == content


def test_a_pil_image_becomes_an_address():
    class Image:
        def save(self, buffer, format):
            buffer.write(format.encode())

    (part,) = as_content([{"type": "image", "image": Image()}])
    assert part["image_url"]["url"] == "data:image/png;base64,UE5H"


def test_parts_share_one_bound():
    parts = [{"type": "text", "text": "x" * 8}, {"type": "text", "text": "y" * 8}]
    cut = bounded(parts, max_chars=10, images=True)
    assert cut == "xxxxxxxx\nyy\n[6 more characters are left out]"


def test_an_error_has_trls_words():
    assert error_content(ValueError("Game over.")) == str({"error": "Game over."})
