"""Keys, tokens and secrets of an ORS environment: read when it is opened, sent in headers, and shown nowhere.

Owns where they are read from, the header that they travel in, and taking them out of what a server says. Called by
`environment`; a program that has values at hand (`spec`) makes `Credentials` itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness_trainer.environments.ors_config import OrsConfig
from harness_trainer.loops.base import EnvironmentFault

CATALOG_KEY = "OPENREWARD_API_KEY"
KEYS_URL = "https://openreward.ai/keys"
_SHORTEST_MASKED = 6  # shorter ones are words that any text may hold
_MASK = "[secret]"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a server is shown. Not one value of it is in a `repr`."""

    api_key: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    domains: Mapping[str, list[str]] = field(default_factory=dict)

    def mask(self, text: str) -> str:
        """The text without any of them: a server's error may quote what it was sent."""
        for value in (self.api_key, self.token, *self.secrets.values()):
            if value and len(value) >= _SHORTEST_MASKED:
                text = text.replace(value, _MASK)
        return text

    def session_headers(self, base_url: str) -> dict[str, str]:
        """What a session is created with. On the platform its sandboxes get the API key too, as the SDK has it."""
        from openreward.api.sandboxes.secrets import (
            WELL_KNOWN_SECRETS,
            augment_secrets_with_api_key,
            build_secrets_header,
        )

        named = {
            name: (value, self.domains.get(name, WELL_KNOWN_SECRETS.get(name, [])))
            for name, value in self.secrets.items()
        }
        every = augment_secrets_with_api_key(named, self.api_key, base_url=base_url, api_base_url=None)
        return {"X-Secrets": build_secrets_header(every)} if every else {}


def read_credentials(config: OrsConfig) -> Credentials:
    """Raises EnvironmentFault for one that is not there; the message names the place, never a value."""
    variable = config.api_key_env or (None if config.is_url else CATALOG_KEY)
    advice = f"; keys are made at {KEYS_URL}" if variable == CATALOG_KEY else ""
    return Credentials(
        api_key=None if variable is None else _from_environ(variable, "the OpenReward key", advice),
        token=None if config.token_env is None else _from_environ(config.token_env, "the server's token"),
        secrets={name: _secret(name, source) for name, source in config.secrets.items()},
        domains=config.secret_domains,
    )


def _secret(name: str, source: str) -> str:
    kind, _, where = source.partition(":")
    if kind == "env":
        return _from_environ(where, f"the secret {name}")
    try:
        value = Path(where).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise EnvironmentFault(f"the secret {name} cannot be read from {where}: {reason}") from None
    if not value:
        raise EnvironmentFault(f"the secret {name} is to be in {where}, which is empty: write it there")
    return value


def _from_environ(variable: str, what: str, advice: str = "") -> str:
    value = os.environ.get(variable)
    if not value:
        raise EnvironmentFault(f"{what} is to be in {variable}, which is not set: export {variable}=...{advice}")
    return value
