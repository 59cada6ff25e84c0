"""What may be streamed early: always a prefix of the final text, never a piece of markup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_proxy.engines.splitter import Splitter


def run(splitter: Splitter, text: str, size: int) -> tuple[str, str]:
    content, reasoning = "", ""
    for start in range(0, len(text), size):
        more = splitter.feed(text[start : start + size])
        content, reasoning = content + more[0], reasoning + more[1]
    return content, reasoning


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("hello", "hello", ""),
        ("a < b and <to be>", "a < b and <to be>", ""),
        ("I look.\n\n<tool_call>{}</tool_call>", "I look.", ""),
        ("\n I look. <tool_call>", "\n I look.", ""),
        ("<tool_call>{}</tool_call> after", "", ""),
        ('{"name": "bash"}', "", ""),
        ("cut in <tool_c", "cut in", ""),
        ("<think>why\n</think>\n\nyes <tool_call>", "yes", "why"),
        ("<think>cut of", "", "cut of"),
        ("no marker at all", "", ""),
        ("prompt opened it</think>\nyes", "yes", "prompt opened it"),
        ("<think>a <tool_call>{}</tool_call>", "", "a"),
        ("<think>a </thin b</think>c", "c", "a </thin b"),
    ],
)
def test_what_is_settled_goes_out_and_the_rest_is_held(text: str, content: str, reasoning: str, size: int) -> None:
    splitter = Splitter(tools=True, reasoning=reasoning != "" or text == "no marker at all")
    shown, thought = run(splitter, text, size)
    if reasoning == "a" and size == 100:
        assert thought in ("", "a")  # all in one piece: the call may hide what came before it
    else:
        assert thought == reasoning
    assert shown == content


def test_without_tools_or_reasoning_nothing_is_held() -> None:
    assert run(Splitter(tools=False, reasoning=False), "x <tool_call>  \n", 1) == ("x <tool_call>  \n", "")


@given(st.lists(st.sampled_from(["<", "tool", "_call", ">", " ", "\n", "a", "<tool_call>", "[", "<|"]), max_size=30))
def test_what_is_shown_is_a_prefix_of_the_text_before_the_first_marker(pieces: list[str]) -> None:
    text = "".join(pieces)
    splitter = Splitter(tools=True, reasoning=False)
    shown = "".join(splitter.feed(piece)[0] for piece in pieces)
    assert text.startswith(shown)
    assert "<tool_call" not in shown
    assert text.partition("<tool_call")[0].startswith(shown)
