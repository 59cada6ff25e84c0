"""`python -m capture_proxy`: the gateway as a program.

Owns arguments, the two listening sockets (TCP or Unix), signals and the ready file. One process, one event loop, two
servers: the agents' port and the admin port never share a socket. Started by `harness_trainer` and by people.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from capture_proxy.admin import admin_app
from capture_proxy.engines.base import Engine
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import FamilyError, StoreError
from capture_proxy.families import NAMES as FAMILY_NAMES
from capture_proxy.gate import Gate
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.http_server import Server
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store

_KEY_VARIABLE = "CAPTURE_PROXY_ADMIN_KEY"
_ENGINE_KEY_VARIABLE = "CAPTURE_PROXY_ENGINE_KEY"
_UNIX = "unix:"


class UsageError(Exception):
    """An argument cannot be used; the message is the one line that the person sees."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 2 for unusable arguments."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection of each agent is one
    try:
        key = _admin_key(args.admin_key_file, args.admin_bind)
        engine_key = _secret(args.engine_key_file, _ENGINE_KEY_VARIABLE, "engine") or None
        with contextlib.ExitStack() as stack:
            agents = [stack.enter_context(_listen(args.agent_bind))]
            if args.agent_socket is not None:
                agents.append(stack.enter_context(_listen(_UNIX + str(args.agent_socket))))
                args.agent_socket.chmod(0o666)
            admin = stack.enter_context(_listen(args.admin_bind))
            store = Store.open(args.store)
            engine = _engine(args, engine_key)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(
                    serve(
                        engine,
                        store,
                        agents,
                        admin,
                        key,
                        args.keepalive,
                        args.hang_up_grace,
                        args.ready_file,
                        Bridging(args.bridging, args.renderer, args.tokenizer, args.thinking_retention),
                        Gate(held=args.hold, patience_s=args.engine_patience),
                        args.name,
                    )
                )
    except (UsageError, StoreError, FamilyError) as error:
        print(f"capture_proxy: {error}", file=sys.stderr)
        return 2
    return 0


def _engine(args: argparse.Namespace, key: str | None) -> Engine:
    try:
        return VllmEngine(
            args.engine_url, transport=args.transport, model=args.model, api_key=key, adapters=args.adapters
        )
    except ValueError as error:
        raise UsageError(f"the engine cannot be asked: {error}") from None


async def serve(
    engine: Engine,
    store: Store,
    agents: Sequence[socket.socket],
    admin: socket.socket,
    key: str,
    keepalive_s: float,
    hang_up_grace_s: float,
    ready_file: Path | None,
    bridging: Bridging,
    gate: Gate,
    name: str,
) -> None:
    """Serve the bound sockets until a signal; then end calls in flight (recorded as aborted) and close the store."""
    gateway = Gateway(
        engine, store, keepalive_s=keepalive_s, hang_up_grace_s=hang_up_grace_s, bridging=bridging, gate=gate, name=name
    )
    servers = [Server(agent_app(gateway)), Server(admin_app(gateway, key))]
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # What is loaded by now stays; and a call makes thousands of small objects that a look through finds nothing in.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    async with gateway.running():
        pairs = zip(servers, (list(agents), [admin]), strict=True)
        tasks = [asyncio.create_task(server.serve(sockets=sockets)) for server, sockets in pairs]
        try:
            for server in servers:
                await server.ready.wait()
            _announce(_url(agents[0]), _url(admin), ready_file)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop()
            await asyncio.gather(*tasks)


def _announce(agent_url: str, admin_url: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        data = json.dumps({"agent_url": agent_url, "admin_url": admin_url, "pid": os.getpid()})
        # Whoever waits for the file must never read half of it.
        with tempfile.NamedTemporaryFile("w", dir=ready_file.parent, delete=False) as part:
            part.write(data)
        os.replace(part.name, ready_file)
    print(f"capture_proxy: agents at {agent_url}, admin at {admin_url}", flush=True)


@contextlib.contextmanager
def _listen(bind: str) -> Iterator[socket.socket]:
    """A listening socket; the file of a Unix one is gone afterwards."""
    if bind.startswith(_UNIX):
        path = Path(bind.removeprefix(_UNIX))
        with _listen_unix(path) as sock:
            yield sock
            path.unlink(missing_ok=True)
        return
    host, port = _split(bind)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise UsageError(f"cannot listen on {bind}: {error.strerror or error}; choose another port or 0") from error
    with sock:
        yield sock


def _listen_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_dead(path)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {_UNIX}{path}: {error.strerror or error}; choose another path") from error
    return sock


def _remove_dead(path: Path) -> None:
    """Remove a socket file that a killed process left; one that answers stays, and binding to it fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _split(bind: str) -> tuple[str, int]:
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{bind!r} is neither HOST:PORT, e.g. 127.0.0.1:0, nor unix:PATH")
    return host.strip("[]") or "0.0.0.0", int(port)


def _url(sock: socket.socket) -> str:
    if sock.family is socket.AF_UNIX:
        return _UNIX + str(Path(sock.getsockname()).absolute())
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _admin_key(path: Path | None, bind: str) -> str:
    if key := _secret(path, _KEY_VARIABLE, "admin"):
        return key
    private = bind.startswith(_UNIX) or _is_loopback(_split(bind)[0])
    where = "" if private else f" (and {bind} is open to other machines)"
    raise UsageError(f"the admin port needs a key{where}: set {_KEY_VARIABLE} or give --admin-key-file")


def _secret(path: Path | None, variable: str, what: str) -> str:
    """A key from a file, else from the environment; "" = none is given."""
    try:
        return path.read_text().strip() if path is not None else os.environ.get(variable, "").strip()
    except OSError as error:
        raise UsageError(f"cannot read the {what} key file {path}: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="capture_proxy", description="Record what an agent's model calls really were."
    )
    add = parser.add_argument
    add("--engine-url", required=True, help="the engine's root, e.g. http://127.0.0.1:8000")
    add("--store", type=Path, required=True, help="SQLite file for sessions and turns")
    add("--agent-bind", default="127.0.0.1:0", metavar="BIND", help="port that agents reach: HOST:PORT or unix:PATH")
    add(
        "--agent-socket",
        type=Path,
        metavar="PATH",
        help="a Unix socket that agents reach as well, whoever may enter its folder (containers it is mounted into)",
    )
    add("--admin-bind", default="127.0.0.1:0", metavar="BIND", help="port of the trainer only: HOST:PORT or unix:PATH")
    add("--admin-key-file", type=Path, help=f"file with the admin key (else ${_KEY_VARIABLE})")
    add("--engine-key-file", type=Path, help=f"file with the engine's API key (else ${_ENGINE_KEY_VARIABLE})")
    add(
        "--name",
        default="",
        help="of several gateways on one store, which this one is: it serves the sessions that it minted and no others",
    )
    add("--ready-file", type=Path, help="written as JSON once both ports answer")
    add(
        "--transport",
        choices=["auto", "generate", "chat", "text"],
        default="auto",
        help="how the engine is asked; text = any OpenAI-compatible server, evaluation only",
    )
    add(
        "--engine-patience",
        type=float,
        default=0.0,
        metavar="S",
        help="how long a call waits for an engine that is away (or held) before it fails; default: not at all",
    )
    add("--hold", action="store_true", help='let no call reach the engine before POST /engine {"ready": true}')
    add("--model", help="the engine's name for the model; default: what the engine serves")
    add("--keepalive", type=float, default=10.0, metavar="S", help="longest silence of a stream")
    add("--hang-up-grace", type=float, default=1.0, metavar="S", help="a call goes on so long for a retry to find it")
    add(
        "--bridging",
        choices=["auto", "always", "never"],
        default="auto",
        help="continue prompts token by token: where proven by ids, without proof, or not at all",
    )
    families = ", ".join(FAMILY_NAMES)
    add("--renderer", default="auto", metavar="FAMILY", help=f"how the model's prompts are written: {families}, ...")
    add("--tokenizer", type=Path, metavar="DIR", help="folder of tokenizer.json; default: the engine's model folder")
    add("--adapters", action="store_true", help="sample with the newest LoRA adapter v<n> that the engine serves")
    add(
        "--thinking-retention",
        choices=["all", "tool_cycle"],
        default="all",
        help="whether earlier reasoning stays in a prompt that a new user message continues",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
