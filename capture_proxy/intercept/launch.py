"""Starts the intercepting proxy, waits until it listens, and ends it.

Owns the proxy's process, the folder with the CA, and the two certificate files an agent may see. The proxy ends when
this process does, however that comes about: it holds the other end of the proxy's stdin. What the proxy does is
`addon`'s. Called by `__main__` and by whoever runs agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from capture_proxy.intercept.environment import agent_env, public_roots
from capture_proxy.intercept.providers import DEFAULT_PROVIDERS, Provider, parse_allowed

PYTHON_VARIABLE = "CAPTURE_PROXY_INTERCEPT_PYTHON"
_ADDON = Path(__file__).with_name("addon")  # a folder that Python runs as a program
_CA = "mitmproxy-ca-cert.pem"
_CA_KEYS = ("mitmproxy-ca.pem", "mitmproxy-ca.p12")
_STOP_GRACE_S = 3.0


class InterceptError(Exception):
    """The proxy cannot be started, or it died; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class InterceptConfig:
    """What the proxy needs to know.

    Example: InterceptConfig("http://127.0.0.1:8101", "http://127.0.0.1:8102", "key", Path("intercept"),
    allow=("mirror.example", "*.files.example")).
    """

    gateway_url: str  # the agents' port, http://HOST:PORT
    admin_url: str | None  # where refusals are reported: http://HOST:PORT or unix:/PATH; None = to the events file only
    admin_key: str
    confdir: Path  # keeps the CA between starts; created, for its owner alone
    bind: str = "127.0.0.1:0"
    allow: Sequence[str] = ()  # see `providers.parse_allowed`
    providers: Sequence[Provider] = DEFAULT_PROVIDERS
    events_path: Path | None = None  # JSON lines; None = confdir/events.jsonl
    log_path: Path | None = None  # the proxy's own words; None = confdir/intercept.log
    python: Path | None = (
        None  # of the environment with mitmproxy; None = $CAPTURE_PROXY_INTERCEPT_PYTHON, or as installed
    )
    start_timeout_s: float = 30.0


class Interceptor:
    """One running proxy, for any number of sessions. An async context manager."""

    def __init__(self, config: InterceptConfig) -> None:
        self.config = config
        self._process: asyncio.subprocess.Process | None = None
        self._address: tuple[str, int] = ("", 0)
        self._log_start = 0  # bytes; earlier starts may have written to the same file
        public = config.confdir / "public"
        self.ca_certificate = public / "ca.pem"  # the CA's certificate; a sandbox may have it
        self.ca_bundle = public / "ca-bundle.pem"  # the same and this machine's public roots
        self.events_path = config.events_path or config.confdir / "events.jsonl"
        self.log_path = config.log_path or config.confdir / "intercept.log"

    @property
    def url(self) -> str:
        """The proxy's address, without credentials."""
        host, port = self._address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def pid(self) -> int:
        """Of the proxy. Raises InterceptError before it was started."""
        if self._process is None:
            raise InterceptError("the intercepting proxy was not started")
        return self._process.pid

    def agent_env(self, token: str) -> dict[str, str]:
        """The variables of an agent on this machine; elsewhere use `environment.agent_env` with its own paths."""
        return agent_env(self.url, token, str(self.ca_certificate), str(self.ca_bundle))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises InterceptError; nothing is left running then."""
        python = await asyncio.to_thread(find_python, self.config)
        orders = _orders(self.config, self.events_path)
        await asyncio.to_thread(_make_folders, self.config.confdir, self.log_path, self.events_path)
        try:
            await self._start(python, orders)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the proxy, its connections with it. Idempotent; goes on to the end when the caller is cancelled."""
        process = self._process
        if process is not None and process.returncode is None:
            await asyncio.shield(asyncio.ensure_future(_end(process)))

    async def wait(self) -> str:
        """Until the proxy has ended; why it did, in a line."""
        if self._process is None:
            raise InterceptError("the intercepting proxy was not started")
        code = await self._process.wait()
        return await asyncio.to_thread(_reason, self.log_path, self._log_start, code)

    async def _start(self, python: Path, orders: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        try:
            self._process = await self._spawn(python, writing)
        except OSError as error:
            raise InterceptError(f"cannot start the intercepting proxy: {error}") from error
        finally:
            os.close(writing)
            if self._process is None:
                os.close(reading)
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: the ready pipe says so
            stdin.write(json.dumps(orders | {"ready_fd": writing}).encode() + b"\n")
            await stdin.drain()
        try:
            line = await asyncio.wait_for(_read_line(reading), self.config.start_timeout_s)
        except TimeoutError:
            raise InterceptError(
                f"the intercepting proxy did not listen within {self.config.start_timeout_s:g} s; see {self.log_path}"
            ) from None
        if not line:
            raise InterceptError(await self.wait())
        ready = json.loads(line)
        self._address = ready["host"], ready["port"]
        await asyncio.to_thread(_publish, self.config.confdir / _CA, self.ca_certificate, self.ca_bundle)

    async def _spawn(self, python: Path, ready_fd: int) -> asyncio.subprocess.Process:
        # The admin key travels by stdin alone; a variable with it would show in the proxy's environment.
        env = {name: value for name, value in os.environ.items() if value != self.config.admin_key}
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                str(python),
                "-Iu",  # its log is there at once, also when it is killed
                str(_ADDON),
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(ready_fd,),
            )


def find_python(config: InterceptConfig) -> Path:
    """The interpreter of the environment that holds mitmproxy. Raises InterceptError when it is not there."""
    named = config.python or (Path(os.environ[PYTHON_VARIABLE]) if os.environ.get(PYTHON_VARIABLE) else None)
    python = named or Path(__file__).parents[2] / ".venv-intercept" / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise InterceptError(
            f"the interception environment is missing ({python} does not exist): run `harness-trainer setup "
            f"intercept` (in a checkout: `make setup-intercept`), or name its python in {PYTHON_VARIABLE}"
        )
    return python


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises InterceptError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InterceptError(f"{what} {text!r} is not HOST:PORT, e.g. 127.0.0.1:0")
    return host.strip("[]") or "0.0.0.0", int(port)


def _orders(config: InterceptConfig, events_path: Path) -> dict[str, Any]:
    try:
        allow = [parse_allowed(entry) for entry in config.allow]
    except ValueError as error:
        raise InterceptError(str(error)) from None
    return {
        "gateway": _url_address(config.gateway_url, "the gateway's address"),
        "admin": _admin_address(config.admin_url),
        "admin_key": config.admin_key,
        "listen": parse_address(config.bind, "the address to bind"),
        "owner": os.getpid(),
        "confdir": str(config.confdir.resolve()),
        "events": str(events_path.resolve()),
        "allow": allow,
        "providers": [asdict(provider) for provider in config.providers],
    }


def _admin_address(url: str | None) -> tuple[str, int] | str | None:
    if url is None or not url.startswith("unix:"):
        return None if url is None else _url_address(url, "the admin address")
    return url.removeprefix("unix:")


def _url_address(url: str, what: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
        raise InterceptError(f"{what} {url!r} is not http://HOST:PORT")
    return parts.hostname, port


def _make_folders(confdir: Path, *files: Path) -> None:
    try:
        confdir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if stat.S_IMODE(confdir.stat().st_mode) & 0o077:
            confdir.chmod(0o700)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
        for name in _CA_KEYS:  # of an older start, or copied here by someone
            if (confdir / name).exists():
                (confdir / name).chmod(0o600)
    except OSError as error:
        raise InterceptError(f"cannot use the folder {confdir}: {error.strerror or error}; choose another") from error


def _publish(ca: Path, certificate: Path, bundle: Path) -> None:
    """Write the files that agents may read, whole or not at all: another proxy may share the folder."""
    own = ca.read_text()
    certificate.parent.mkdir(exist_ok=True, mode=0o755)
    for path, text in ((certificate, own), (bundle, f"{public_roots().rstrip()}\n{own}".lstrip())):
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
            part.write(text)
        os.chmod(part.name, 0o644)
        os.replace(part.name, path)


async def _read_line(fd: int) -> bytes:
    """One line, or b"" when the other end was closed. Owns `fd`."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    try:
        return await reader.readline()
    finally:
        transport.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    for step in (process.terminate, process.kill):
        try:
            await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                step()
    await process.wait()


def _reason(log: Path, start: int, code: int) -> str:
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return f"the intercepting proxy ended with exit code {code}: {last[:300]} (log: {log})"
