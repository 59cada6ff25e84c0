"""The hosts of model providers, and where their APIs lie on the gateway.

Owns data only: host names as agents call them without a base URL, and how a provider's path becomes one of the
gateway's. `launch` hands it to the proxy. What a path means is the dialects'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider's host; all its traffic goes to the gateway, on any port.

    `host` is exact or "*.suffix". `rewrites` are (regular expression at the start of the path, what replaces it); the
    first that matches is used, a path that none matches is kept.

    Example: Provider("openrouter.ai", ((r"/api/v1/", "/v1/"),)) turns /api/v1/chat/completions into
    /v1/chat/completions.
    """

    host: str
    rewrites: tuple[tuple[str, str], ...] = ()


_AZURE = ((r"/openai/deployments/[^/]+/", "/v1/"), (r"/openai/v1/", "/v1/"), (r"/openai/", "/v1/"))
_DASHSCOPE = ((r"/compatible-mode/v1/", "/v1/"), (r"/apps/anthropic/", "/"))
_MOONSHOT = ((r"/anthropic/", "/"),)
_ZHIPU = ((r"/api/anthropic/", "/"), (r"/api/(coding/)?paas/v4/", "/v1/"))

# Seen in agents' traffic, or documented by the provider as the base URL of an API that one of our dialects speaks.
DEFAULT_PROVIDERS = (
    Provider("api.openai.com"),
    Provider("*.openai.azure.com", _AZURE),
    Provider("*.cognitiveservices.azure.com", _AZURE),
    Provider("api.anthropic.com"),
    Provider("generativelanguage.googleapis.com", ((r"/v1beta/openai/", "/v1/"),)),
    Provider("dashscope.aliyuncs.com", _DASHSCOPE),
    Provider("dashscope-intl.aliyuncs.com", _DASHSCOPE),
    Provider("dashscope-us.aliyuncs.com", _DASHSCOPE),
    Provider("openrouter.ai", ((r"/api/v1/", "/v1/"), (r"/api/", "/"))),
    Provider("api.x.ai"),
    Provider("api.mistral.ai"),
    Provider("api.deepseek.com", ((r"/anthropic/", "/"), (r"/beta/", "/v1/"))),
    Provider("api.moonshot.ai", _MOONSHOT),
    Provider("api.moonshot.cn", _MOONSHOT),
    Provider("api.kimi.com", ((r"/coding/", "/"),)),
    Provider("api.z.ai", _ZHIPU),
    Provider("open.bigmodel.cn", _ZHIPU),
    Provider("api.groq.com", ((r"/openai/v1/", "/v1/"),)),
    Provider("api.together.xyz"),
    Provider("api.fireworks.ai", ((r"/inference/v1/", "/v1/"),)),
    Provider("api.cerebras.ai"),
    Provider("integrate.api.nvidia.com"),
    Provider("router.huggingface.co"),
)

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def parse_provider(text: str) -> Provider:
    """A provider as a person writes it: HOST, or HOST/PATH/=/NEW/PATH/, e.g. "llm.example.com/openai/v1=/v1".

    Raises ValueError that says what is wrong.
    """
    target, equals, new = text.partition("=")
    host, slash, path = target.partition("/")
    host = host.lower()
    if not _NAME.fullmatch(host):
        raise ValueError(f"provider {text!r}: {host!r} is not a host name; write HOST or HOST/PATH=/NEWPATH")
    if not equals and not slash:
        return Provider(host)
    if not equals or not new.startswith("/"):
        raise ValueError(f"provider {text!r}: say what the path becomes, e.g. {host}/openai/v1=/v1")
    old, new = f"/{path.strip('/')}/", f"/{new.strip('/')}/"
    return Provider(host, ((re.escape(old.replace("//", "/")), new.replace("//", "/").replace("\\", r"\\")),))


def parse_allowed(text: str) -> str:
    """An entry of the allow-list, checked: HOST (ports 80 and 443), HOST:PORT or HOST:*, where HOST may be *.suffix.

    Raises ValueError that says what is wrong.
    """
    entry = text.strip().lower()
    host, colon, port = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        host, port = entry, ""
    bracketed = re.fullmatch(r"\[[0-9a-f:.]+\]", host)
    valid_port = port in ("", "*") or (port.isdecimal() and 0 < int(port) < 65536)
    if not valid_port or (colon and not port) or not (bracketed or _NAME.fullmatch(host)):
        raise ValueError(
            f"{text!r} cannot be allowed: write HOST, HOST:PORT or HOST:*, e.g. mirror.example or *.files.example:443"
        )
    return entry
