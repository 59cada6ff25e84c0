"""Any command as a harness: `--harness "cmd:python my_agent.py"`.

Owns which variables such a command is given. It may speak any dialect and read the variables of any provider's client:
all lead to the gateway, all keys are the session's token. Called by `load_harness`, and by whoever hands a command to a
process of ours that works in another folder (`pin_command`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.base import Harness, literal

PREFIX = "cmd:"
INSTRUCTION = "HARNESS_TRAINER_INSTRUCTION"
_PINNED = "harness-trainer-pinned:"  # first word of a pinned command: what it takes along is settled
_TAKEN = "harness-trainer-file:"  # before the absolute path of a file to take along, in a pinned command
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")  # what metrics' names do not tell apart, and paths cannot hold
_LONGEST_NAME = 48  # characters, without the prefix and the hash

_WITH_V1, _PLAIN, _TOKEN, _MODEL = "${base_url}/v1", "${base_url}", "${token}", "${model}"
ENV = {
    INSTRUCTION: "${instruction}",
    "OPENAI_BASE_URL": _WITH_V1,
    "OPENAI_API_BASE": _WITH_V1,
    "OPENAI_API_KEY": _TOKEN,
    "OPENAI_MODEL": _MODEL,
    "ANTHROPIC_BASE_URL": _PLAIN,
    "ANTHROPIC_API_BASE": _PLAIN,
    "ANTHROPIC_API_KEY": _TOKEN,
    "ANTHROPIC_AUTH_TOKEN": _TOKEN,
    "ANTHROPIC_MODEL": _MODEL,
    "GOOGLE_GEMINI_BASE_URL": _PLAIN,
    "GEMINI_API_KEY": _TOKEN,
    "GOOGLE_API_KEY": _TOKEN,
    "GEMINI_MODEL": _MODEL,
    "LLM_BASE_URL": _WITH_V1,
    "LLM_API_KEY": _TOKEN,
    "LLM_MODEL": _MODEL,
}


def command_harness(spec: str, folder: Path) -> Harness:
    """The harness of `cmd:<command>`; the instruction comes on standard input and in a variable.

    It runs in the sandbox, in the task's folder, without a shell. Files of `folder` that it names as arguments are
    taken along; other paths are the sandbox's. What it prints is its final message. Raises ConfigError when there is
    no command, its quotes do not match, or a file cannot be taken along.
    """
    try:
        words = shlex.split(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(
            f"harness {spec!r}: the command cannot be split into words ({str(error).lower()}); quote it as in a shell"
        ) from error
    look_in = None if words[:1] == [_PINNED] else folder
    if look_in is None:
        del words[0]
    if not words or not words[0]:
        raise ConfigError(f'harness {spec!r} has no command: give one, as in --harness "cmd:python my_agent.py"')
    if _is_ours(words[0], look_in):
        raise ConfigError(f'harness {spec!r}: name the interpreter of {words[0]} too, as in "cmd:sh {words[0]}"')
    ours = {word: f"agent/{Path(word).name}" for word in words[1:] if _is_ours(word, look_in)}
    if len(set(ours.values())) < len(ours):
        raise ConfigError(f"harness {spec!r}: two of its files have the same name; rename one")
    return Harness.model_validate(
        {
            "name": f"{PREFIX}{_name(words, ours)}",
            "dialect": "openai_chat",  # what to expect; the gateway takes them all
            "argv": [f"${{home}}/{ours[word]}" if word in ours else literal(word) for word in words],
            "stdin": "${instruction}",
            "env": ENV,
            "files": {f"/home/{inside}": literal(_text(spec, word, folder)) for word, inside in ours.items()},
            "output": {"type": "text"},
            "notes": "a command of the user's: nothing was told to leave anything alone",
        }
    )


def pin_command(spec: str) -> str:
    """The same command for a process that works in another folder: it takes the same files along, and no other of that
    folder, whose names may be those of the task's files.

    A command that `command_harness` refuses is left as it is.
    """
    try:
        words = shlex.split(spec.removeprefix(PREFIX))
    except ValueError:
        return spec
    if not words or not words[0] or words[0] == _PINNED or _lies_in(Path(), words[0]):
        return spec
    taken = [f"{_TAKEN}{Path(word).resolve()}" if _lies_in(Path(), word) else word for word in words[1:]]
    return PREFIX + shlex.join([_PINNED, words[0], *taken])


def _name(words: list[str], ours: Mapping[str, str]) -> str:
    """After the first file of ours that it runs, its interpreter left out, else after its first word. Arguments may be
    long, alike or secret: of them there is a hash."""
    first = next((n for n, word in enumerate(words) if word in ours), 0)
    begins = Path(ours.get(words[first], words[first])).name
    rest = [Path(ours[word]).name if word in ours else word for word in words[first + 1 :]]
    name = _STRANGE.sub("_", begins)[:_LONGEST_NAME]
    if not rest and name == begins:
        return name
    return f"{name}-{hashlib.sha256(shlex.join([begins, *rest]).encode(errors='surrogateescape')).hexdigest()[:4]}"


def _is_ours(word: str, folder: Path | None) -> bool:
    return word.startswith(_TAKEN) or (folder is not None and _lies_in(folder, word))


def _lies_in(folder: Path, word: str) -> bool:
    return not os.path.isabs(word) and os.path.isfile(folder / word)  # a word may be a script, too long for a path


def _text(spec: str, word: str, folder: Path) -> str:
    try:
        return (folder / word.removeprefix(_TAKEN)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"harness {spec!r}: {word} cannot be taken along, it must be readable UTF-8 text") from error
