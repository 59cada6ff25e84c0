"""Whether a public address leads to this run's gateway, asked the way an agent asks, but with a token of no session.

Owns the question and its judgement: the gateway must refuse, in exactly the words with which it refuses on loopback.
Any other answer (a tunnel's error page, a login, a stranger's service) is not ours. Blocking; called by `public_way`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, TypeAlias

import httpx

PATH = "/v1/models"

Verdict: TypeAlias = Literal["ours", "not_ours", "gateway_away"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Example: Probe("not_ours", "it answered 502"). `gateway_away` = nothing can be said of the way."""

    verdict: Verdict
    reason: str = ""


def probe(public_url: str, local_url: str, *, timeout_s: float = 10.0) -> Probe:
    """Never raises for what it meets."""
    headers = {"authorization": f"Bearer no-session-{secrets.token_urlsafe(16)}", "user-agent": "harness-trainer"}
    own = _ask(local_url, headers, timeout_s, through_proxies=False)
    if isinstance(own, str) or own.status_code != 401:
        said = own if isinstance(own, str) else f"it answered {own.status_code}"
        return Probe("gateway_away", f"the gateway at {local_url} refuses nobody: {said}")
    seen = _ask(public_url, headers, timeout_s, through_proxies=True)
    if isinstance(seen, str):
        return Probe("not_ours", f"no answer: {seen}")
    if seen.status_code != 401:
        return Probe("not_ours", f"it answered {seen.status_code}, where this run's gateway answers 401")
    if seen.content != own.content:
        return Probe(
            "not_ours", "it answered 401, but not as this run's gateway does: something before it wants a login"
        )
    return Probe("ours")


def _ask(url: str, headers: dict[str, str], timeout_s: float, *, through_proxies: bool) -> httpx.Response | str:
    """The answer, or why there is none."""
    try:
        return httpx.get(f"{url.rstrip('/')}{PATH}", headers=headers, timeout=timeout_s, trust_env=through_proxies)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return " ".join(str(error).split()) or type(error).__name__
