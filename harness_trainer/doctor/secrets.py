"""Secrets as files: their exact bytes into the environment, and whether something on the way spoiled them.

A file is taken as it is: `$`, `#`, quotes and newlines mean nothing. One thing is taken off, a newline at the end of a
key that goes into an HTTP header, where it could only fail: editors and `echo` leave one. A file of known bytes comes
the same way and is compared, so that whatever spoils secrets (a checkout that turns line ends, a copy by way of an .env
file) is noticed before a key is blamed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness_trainer.config import RunConfig
from harness_trainer.doctor.base import Check
from harness_trainer.errors import ConfigError, SetupError

SECRETS = Path("/run/secrets")
CANARY_FILE = "harness-trainer-canary"
CANARY = (
    "canary: $HOME ${NOT_SET:-no} $$ # no comment \"double\" 'single' `tick` \\back\\n %s {{go}} tab\there é ключ 🔑\n"
    "second line, and one newline at the end\n"
).encode()
# Keys that go into a header: they are one line.
ONE_LINE = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "E2B_API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "CAPTURE_PROXY_ENGINE_KEY",
)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def take_over(folder: Path) -> list[str]:
    """Every secret below `folder` becomes the variable of its file's name; the names. An empty file is no secret.

    Raises SetupError for a file that cannot be read, ConfigError for one that no variable can hold.
    """
    taken = []
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not _VARIABLE.fullmatch(file.name):
            continue
        try:
            value = value_in(file, file.name)
        except OSError as error:
            raise SetupError(
                f"the secret {file.name} cannot be read ({error.strerror}): its file on the host must be readable by "
                "user 10001, for example chmod 644 in a folder that only you may enter"
            ) from None
        except ValueError as error:
            raise ConfigError(f"the secret {file.name} {error}: is it the right file?") from None
        if value:
            os.environb[file.name.encode()] = value
            taken.append(file.name)
    return taken


def value_in(file: Path, name: str) -> bytes:
    """What the variable gets from the file. Raises OSError, and ValueError for a byte that no variable can hold."""
    value = file.read_bytes()
    if b"\0" in value:
        raise ValueError("has a zero byte, which no variable can hold")
    return value.removesuffix(b"\n").removesuffix(b"\r") if name in ONE_LINE else value


def check(config: RunConfig, environ: Mapping[str, str], folder: Path = SECRETS) -> Iterator[Check]:
    """The way of secrets, the shape of the keys that are there, and those that the run needs and that are not."""
    canary = folder / CANARY_FILE
    if canary.exists():
        whole = canary.read_bytes() == CANARY
        fix = "docker/secrets/canary was changed, perhaps by an editor or by line ends: restore it from the repository"
        yield Check("secrets arrive byte for byte", whole, "as sent" if whole else "changed on the way", fix)
    for name in ONE_LINE:
        if name in environ and (problem := spoiled(name, environ[name])):
            fix = (
                f"write the key alone into its file: printf %s KEY > docker/secrets/{name.lower()}, and name it in .env"
            )
            yield Check(f"key {name}", False, problem, fix)
    for name, what in _needed(config):
        if not environ.get(name):
            fix = f"set {name} (compose: put it into a file, and name that as {name}_FILE in .env)"
            yield Check(f"key {name}", False, f"missing, and {what} needs it", fix)


def spoiled(name: str, value: str) -> str | None:
    """What is wrong with a key by its looks, without showing it; None = nothing."""
    if value.startswith("\ufeff"):
        return "it begins with a byte order mark"
    if value != value.strip():
        return "it begins or ends with white space"
    if any(ord(character) < 32 for character in value):
        return "it has a line end or another control character inside"
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'`":
        return "it is in quotes, which would be sent along"
    if value.startswith(("${", "$(", f"{name}=")):
        return "it is the text of a setting, not its value"
    if not value.isascii():
        return "it has characters that no header can carry"
    if name == "HF_TOKEN" and not value.startswith("hf_"):
        return "it does not begin with hf_, so something is missing or it is another key"
    return None


def _needed(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.sandbox.type == "e2b" and any(source.env.type == "own" for source in config.each_source):
        yield "E2B_API_KEY", "--sandbox e2b"
    if "wandb" in config.learner.report_to and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        yield "WANDB_API_KEY", "learner.report_to wandb"
