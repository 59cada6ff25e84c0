"""Secret values taken out of any text that a person, a log or a terminal gets to see.

Pure. Called wherever something leaves this program that a job, a service or an environment has said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from urllib.parse import quote

MASK = "***"
_SHORTEST = 6  # characters; a shorter value is no secret, and would blot out ordinary words


class Mask:
    """Example: Mask(["hf_abcdef"])("token hf_abcdef refused") == "token *** refused"."""

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {value.strip() for value in secrets}
        forms = {form for value in values if len(value) >= _SHORTEST for form in _forms(value)}
        self._forms = sorted(forms, key=len, reverse=True)  # one that holds another goes first

    def __call__(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, MASK)
        return text


def _forms(value: str) -> set[str]:
    """As it is, as it stands in JSON, in a URL, and line by line."""
    lines = {line.strip() for line in value.splitlines() if len(line.strip()) >= _SHORTEST}
    return {value, json.dumps(value)[1:-1], quote(value, safe=""), *lines}
