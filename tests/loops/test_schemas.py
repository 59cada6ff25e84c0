"""A function's JSON schema is the one that transformers makes of it, wherever transformers makes one."""

from __future__ import annotations

import enum
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Dict, List, Literal, NotRequired, Optional, Tuple, TypedDict, Union  # noqa: UP035

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_trainer.loops.schemas import SchemaError, function_schema, type_schema


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    A = "a"
    B = 2
    C = None


SIMPLE = [str, int, float, bool, list, dict, tuple, Any, type(None), Color, Level, Mixed]
LITERALS = [Literal[1, 2], Literal["left", "right"], Literal["a", 1, True, None], Literal[True]]


def wrapped(inner):
    return st.one_of(
        inner.map(lambda hint: list[hint]),
        inner.map(lambda hint: List[hint]),  # noqa: UP006
        inner.map(lambda hint: dict[str, hint]),
        inner.map(lambda hint: Dict[str, hint]),  # noqa: UP006
        inner.map(lambda hint: Optional[hint]),  # noqa: UP045
        inner.map(lambda hint: Annotated[hint, "a note"]),
        st.tuples(inner, inner).map(lambda pair: tuple[pair]),
        st.tuples(inner, inner).map(lambda pair: Tuple[pair]),  # noqa: UP006
        st.tuples(inner, inner).map(lambda pair: Union[pair]),  # noqa: UP007
        st.tuples(inner, inner, inner).map(lambda three: Union[three]),  # noqa: UP007
    )


HINTS = st.recursive(st.sampled_from([*SIMPLE, *LITERALS, List, Dict, Tuple]), wrapped, max_leaves=6)  # noqa: UP006
WORDS = st.text(string.ascii_letters + "  .,-'", min_size=1, max_size=30).map(lambda text: text.strip() or "x")
SECTIONS = st.sampled_from(["", "\n\n    Returns:\n        What it is.", "\n\n    Raises:\n        ValueError: never."])
CHOICES = st.sampled_from(["", ' (choices: ["tea", " coffee "])', " (choices: [1, 2])", " (Choices: [])"])


@st.composite
def functions(draw):
    """A function as a person writes one, made of source code."""
    names = draw(st.lists(st.sampled_from(["word", "x", "path", "n_2"]), unique=True, max_size=3))
    num_defaults = draw(st.integers(0, len(names)))
    hints, parts, lines = {}, [], []
    for i, name in enumerate(names):
        hints[name] = draw(HINTS)
        parts.append(f"{name}: H[{name!r}]" + (" = None" if i >= len(names) - num_defaults else ""))
        more = draw(st.sampled_from(["", "\n            and on,", "\n\n            over: an empty line"]))
        kind = draw(st.sampled_from(["", " (str)", " (`int`, optional)"]))
        lines.append(f"        {name}{kind}: {draw(WORDS)}{more}{draw(CHOICES)}")
    args = "\n\n    Args:\n" + "\n".join(lines) if names else ""
    hints["return"] = draw(st.sampled_from([str, None, list[int], object]))
    receiver = ["self"] if draw(st.booleans()) else []
    doc = f"    {draw(WORDS)}\n    More.{args}{draw(SECTIONS)}\n"
    source = f"def tool({', '.join(receiver + parts)}) -> H['return']:\n    '''\n{doc}    '''\n"
    made = {"H": hints}
    exec(source.replace("'''\n", '"""\n').replace('    """\n"""', '"""'), made)
    return made["tool"]


@settings(max_examples=200, deadline=None)
@given(functions())
def test_a_schema_is_that_of_transformers(function):
    from transformers.utils import get_json_schema

    assert function_schema(function) == get_json_schema(function)


def test_a_bound_and_a_wrapped_method_are_those_of_transformers():
    import functools

    from transformers.utils import get_json_schema

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Game:
        @logged
        def guess(self, word: str, hint: Optional[int] = None) -> str:  # noqa: UP045
            """Guess it.

            Args:
                word: The word
                hint: Its length
            """
            return word

        @staticmethod
        async def stay(steps: Literal[1, 2] = 1):
            """Do nothing.

            Args:
                steps: How long
            """

    for method in (Game().guess, Game().stay):
        assert function_schema(method) == get_json_schema(method)
    assert function_schema(Game().stay)["function"]["parameters"]["properties"]["steps"] == {
        "type": "integer",
        "enum": [1, 2],
        "description": "How long",
    }


class Move(TypedDict):
    row: int
    note: NotRequired[str]


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (Mapping[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (
            list[Move],
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"row": {"type": "integer"}, "note": {"type": "string"}},
                    "required": ["row"],
                },
            },
        ),
    ],
)
def test_hints_that_transformers_refuses(hint, schema):
    assert type_schema(hint) == schema


def no_docstring(x: int):
    return x


def no_args(x: int):
    """Does it."""


def another_arg(x: int):
    """Does it.

    Args:
        y: Not x
    """


def no_hint(x):
    """Does it.

    Args:
        x: What
    """


def of_a_class(x: pytest.MonkeyPatch):
    """Does it.

    Args:
        x: What
    """


def many(*x: int):
    """Does it.

    Args:
        x: What
    """


def unreadable(x: Nowhere):  # noqa: F821
    """Does it.

    Args:
        x: What
    """


def bad_choices(x: str):
    """Does it.

    Args:
        x: What (choices: tea, coffee)
    """


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_docstring, "no docstring"),
        (no_args, "nothing of the argument 'x'"),
        (another_arg, "nothing of the argument 'x'"),
        (no_hint, "'x' has no type hint"),
        (of_a_class, "'x': the type hint"),
        (many, "'x' cannot be given by name"),
        (unreadable, "type hints cannot be read: NameError"),
        (bad_choices, "choices of its argument 'x'"),
    ],
)
def test_what_is_missing_is_named(function, said):
    with pytest.raises(SchemaError, match=said):
        function_schema(function)


@pytest.mark.parametrize("hint", [tuple[int], Literal[b"a"], enum.Enum("Empty", []), enum.Enum("Odd", {"A": (1,)})])
def test_hints_without_a_schema(hint):
    with pytest.raises(SchemaError):
        type_schema(hint)
