"""What is started for each way, and where its address stands in what it prints. Pure, but for looking for programs.

Called by `public_way`.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from urllib.parse import urlsplit

from harness_trainer.errors import SetupError
from harness_trainer.expose import CloudflaredExpose, CommandExpose, DirectExpose, ExposeConfig, GradioExpose

_URL = re.compile(r"https?://[^\s\"'<>|\\]+")
_QUICK = re.compile(r"https://[a-z0-9-]+\.trycloudflare\.com\b")
# Of this machine, or named in an error.
_NO_ADDRESS = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "api.trycloudflare.com")
_CLOUDFLARED_HINT = (
    "install it (https://developers.cloudflare.com/cloudflare-one/connections/connect-networks/downloads/), name it "
    "with --gateway.expose.binary, or choose another way"
)


def argv_of(config: ExposeConfig, gateway: str) -> list[str] | None:
    """The process that leads to the gateway at HOST:PORT; None = there is none. Raises SetupError."""
    if isinstance(config, CloudflaredExpose):
        program = shutil.which(config.binary)
        if program is None:
            raise SetupError(f"there is no {config.binary} on this machine: {_CLOUDFLARED_HINT}")
        return [program, "tunnel", "--no-autoupdate", "--url", f"http://{gateway}"]
    if isinstance(config, GradioExpose):
        if importlib.util.find_spec("gradio") is None:
            raise SetupError("--gateway.expose gradio needs Gradio: pip install gradio, or choose another way")
        share = [] if config.share_server is None else ["--share-server", config.share_server]
        return [sys.executable, "-m", "harness_trainer.expose.gradio_share", gateway, *share]
    if isinstance(config, CommandExpose):
        port = gateway.rpartition(":")[2]
        words = [word.replace("{port}", port).replace("{gateway}", gateway) for word in shlex.split(config.command)]
        if shutil.which(words[0]) is None:
            raise SetupError(f"--gateway.expose.command: there is no program {words[0]!r} on this machine")
        return words
    if isinstance(config, DirectExpose) and config.listen is not None:
        return [sys.executable, "-m", "harness_trainer.expose.open_port", config.listen, gateway]
    return None


def addresses_in(config: ExposeConfig, printed: str) -> list[str]:
    """What may be the public address, in what the process has printed so far; the newest first."""
    pattern = _QUICK if isinstance(config, CloudflaredExpose) else _URL
    found = [url.rstrip(".,;:)]}/") for url in pattern.findall(printed)]
    return list(dict.fromkeys(url for url in reversed(found) if _is_public(urlsplit(url).hostname or "")))


def _is_public(host: str) -> bool:
    return host not in _NO_ADDRESS and ("." in host or ":" in host)
