"""Addresses in what tunnels print, the proof that an address is ours, and each way opened by a real process."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError, GatewayFailed, SetupError
from harness_trainer.expose import CloudflaredExpose, CommandExpose, DirectExpose, ExposeConfig, GradioExpose, NoExpose
from harness_trainer.expose.probe import probe
from harness_trainer.expose.public_way import Pace
from harness_trainer.expose.tunnels import addresses_in, argv_of
from harness_trainer.rundir import RunDir
from harness_trainer.supervision.parts import Parts
from harness_trainer.supervision.restarts import RestartConfig, Restarts
from harness_trainer.supervision.way_out import WayOut, environment
from harness_trainer.workload import require_way_out
from sandboxes.base import Access, Endpoint, SandboxError, SandboxGone
from tests.capture.serving import served
from tests.expose.gates import Gate, gate

QUICK = Pace(opening=8.0, poll=0.02, look=0.05, failures=2)
CLOUDFLARED_LOG = """\
2026-01-16T08:32:54Z INF Thank you for trying Cloudflare Tunnel. See https://developers.cloudflare.com/cloudflare-one
2026-01-16T08:32:54Z INF Requesting new quick Tunnel on trycloudflare.com...
2026-01-16T08:32:58Z INF +------------------------------------------------------------+
2026-01-16T08:32:58Z INF |  https://oklahoma-solo-younger-truck.trycloudflare.com      |
2026-01-16T08:32:58Z INF +------------------------------------------------------------+
2026-01-16T08:32:58Z INF Settings: map[protocol:quic url:http://127.0.0.1:7860]
"""


# -- what they print ----------------------------------------------------------------------------------------------


def test_an_address_is_found_in_what_a_program_prints() -> None:
    quick = "https://oklahoma-solo-younger-truck.trycloudflare.com"
    assert addresses_in(CloudflaredExpose(), CLOUDFLARED_LOG) == [quick]
    refused = 'ERR failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": timeout'
    assert addresses_in(CloudflaredExpose(), refused) == []
    command = CommandExpose(command="x")
    assert addresses_in(command, "forwarding https://a.example -> http://localhost:80\nnow (https://b.example/).") == [
        "https://b.example",
        "https://a.example",
    ]
    assert addresses_in(command, "waiting for http://127.0.0.1:8000 and http://0.0.0.0:1") == []


def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no nowhere-cloudflared on this machine: install it"):
        argv_of(CloudflaredExpose(binary="nowhere-cloudflared"), "127.0.0.1:1")
    with pytest.raises(SetupError, match="no program 'nowhere-ssh'"):
        argv_of(CommandExpose(command="nowhere-ssh -R {port}"), "127.0.0.1:1")
    assert argv_of(CommandExpose(command="env X='a b' {port} {gateway}"), "h:81") == ["env", "X=a b", "81", "h:81"]
    assert argv_of(DirectExpose(), "h:1") is argv_of(NoExpose(), "h:1") is None
    program = tmp_path / "cloudflared"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    argv = argv_of(CloudflaredExpose(binary=str(program)), "127.0.0.1:8101")
    assert argv == [str(program), "tunnel", "--no-autoupdate", "--url", "http://127.0.0.1:8101"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"type": "command"}, "is empty"), ({"type": "direct", "listen": "8000"}, "HOST:PORT"), ("ngrok", "ngrok")],
)
def test_settings_that_cannot_be(settings: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RunConfig.model_validate({"gateway": {"expose": settings}})


# -- the proof ----------------------------------------------------------------------------------------------------


async def test_only_this_runs_gateway_is_ours(tmp_path: Path) -> None:
    async with served(ScriptedEngine([]), tmp_path / "store.sqlite") as gateway:
        found = await asyncio.to_thread(probe, gateway.agent_url, gateway.agent_url)
        assert found.verdict == "ours"
        for status, body, says in ((502, b"", "502"), (200, b"{}", "200"), (401, b"log in first", "wants a login")):
            with gate(status, body) as other:
                found = await asyncio.to_thread(probe, other.url, gateway.agent_url)
            assert found.verdict == "not_ours" and says in found.reason
            token = other.asked[0][1]
            assert token is not None and token.startswith("Bearer no-session-")  # asked as agents ask
        found = await asyncio.to_thread(probe, "http://127.0.0.1:9", gateway.agent_url)
        assert found.verdict == "not_ours" and "no answer" in found.reason
        found = await asyncio.to_thread(probe, gateway.agent_url, "http://127.0.0.1:9")
        assert found.verdict == "gateway_away"


# -- opened, watched, opened again --------------------------------------------------------------------------------


class Opened:
    """A run's way out over a gate that plays the gateway."""

    def __init__(self, folder: Path, gateway: Gate, config: ExposeConfig, public_url: str | None = None) -> None:
        self.run = RunDir(folder / "run")
        self.run.internal.mkdir(parents=True)
        self.said: list[str] = []
        self.steering = folder / "steering"
        self.steering.mkdir()
        restarts = Restarts(RestartConfig(max_deaths=5, backoff_s=0.01))
        self.parts = Parts(restarts, event=self.run.event, say=self.said.append)
        self.way = WayOut(config, public_url, run=self.run, registry=folder / "owned", say=self.said.append, pace=QUICK)
        self.gateway = gateway
        self.endpoint = Endpoint()

    def open(self) -> Opened:
        self.endpoint = self.way.endpoint(self.gateway.url, None, self.parts)
        return self

    def look_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < end, self.said
            self.parts.look()
            time.sleep(0.02)

    def close(self) -> None:
        self.way.close()
        self.parts.stop()


def tunnel(folder: Path) -> CommandExpose:
    return CommandExpose(command=f"{sys.executable} -m tests.expose.playing_tunnel {{port}} {folder / 'steering'}")


@pytest.fixture
def ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Opened]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("CAPTURE_PROXY_ENGINE_KEY", "not for tunnels")
    with gate() as gateway:
        opened: list[Opened] = []

        def make(config: ExposeConfig, public_url: str | None = None) -> Opened:
            opened.append(Opened(tmp_path, gateway, config, public_url))
            return opened[-1]

        yield make
        for each in opened:
            each.close()


def test_a_tunnel_that_dies_is_opened_again_and_its_new_address_told(
    ways: Callable[..., Opened], tmp_path: Path
) -> None:
    run = ways(tunnel(tmp_path)).open()
    first = run.endpoint.public_now()
    assert first is not None and first == run.endpoint.public_url and first.startswith("http://127.0.0.2:")
    access = Access(gateway=run.endpoint)
    access.require_same(first)
    os.kill(int((run.steering / "pid").read_text()), signal.SIGKILL)
    run.look_until(lambda: run.endpoint.public_now() not in (None, first))
    second = access.now().gateway
    assert second is not None and second.public_url != first
    with pytest.raises(SandboxGone, match="has moved to"):
        access.require_same(first)
    run.look_until(lambda: run.run.events.read_text().count("gateway_exposed") == 2)
    assert run.run.events.read_text().count("gateway_unreachable") == 1
    assert "knows of the run's keys: []" in (run.run.logs / "tunnel.log").read_text()


def test_a_tunnel_gets_the_keys_that_may_be_its_own_and_no_others(tmp_path: Path) -> None:
    given = {
        "PATH": "/bin",
        "HF_TOKEN": "1",
        "E2B_API_KEY": "2",
        "NGROK_AUTHTOKEN": "3",
        "CAPTURE_PROXY_ENGINE_KEY": "4",
    }
    assert environment(CloudflaredExpose(), given) == {"PATH": "/bin", "NGROK_AUTHTOKEN": "3"}
    assert environment(GradioExpose(), given) == {"PATH": "/bin", "NGROK_AUTHTOKEN": "3"}
    assert set(environment(tunnel(tmp_path), given)) == {"PATH", "HF_TOKEN", "E2B_API_KEY", "NGROK_AUTHTOKEN"}


def test_a_tunnel_that_lives_and_leads_nowhere_is_replaced(ways: Callable[..., Opened], tmp_path: Path) -> None:
    run = ways(tunnel(tmp_path)).open()
    first = run.endpoint.public_now()
    (run.steering / "deaf").touch()
    run.look_until(lambda: run.endpoint.public_now() is None)
    with pytest.raises(SandboxError, match="opened again"):
        Access(gateway=run.endpoint).now()
    with pytest.raises(SandboxGone, match="cannot be reached from outside"):
        Access(gateway=run.endpoint).require_same(first)
    (run.steering / "deaf").unlink()
    run.look_until(lambda: run.endpoint.public_now() not in (None, first))


def test_a_gateway_that_is_away_is_not_the_tunnels_fault(ways: Callable[..., Opened], tmp_path: Path) -> None:
    run = ways(tunnel(tmp_path)).open()
    first = run.endpoint.public_now()
    run.gateway.status = 503  # on loopback and through the tunnel alike
    num = len(run.gateway.asked)
    run.look_until(lambda: len(run.gateway.asked) > num + 6)
    assert run.endpoint.public_now() == first


async def test_new_sandboxes_wait_for_the_new_address(ways: Callable[..., Opened], tmp_path: Path) -> None:
    file = tmp_path / "public_url"
    access = Access(gateway=Endpoint("http://127.0.0.1:1", None, "https://old.example", file))
    waiting = asyncio.create_task(access.soon(within_s=5.0))
    await asyncio.sleep(0.05)
    file.write_text("https://new.example\n")
    found = (await waiting).gateway
    assert found is not None and found.public_url == "https://new.example"
    file.unlink()
    with pytest.raises(SandboxError):
        await access.soon(within_s=0.0)


def test_a_way_that_never_leads_here_ends_the_start_with_its_reason(
    ways: Callable[..., Opened], tmp_path: Path
) -> None:
    with pytest.raises(GatewayFailed, match=r"died: cannot log in \(log: .*tunnel.log\)"):
        ways(CommandExpose(command="sh -c 'echo cannot log in; exit 1'")).open()


def test_an_address_of_somebody_else_is_never_used(
    ways: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "QUICK", Pace(opening=0.3, poll=0.02, look=0.05))
    with gate(200, b"hello") as stranger:
        run = ways(DirectExpose(), stranger.url)
        with pytest.raises(GatewayFailed, match=f"at {stranger.url} from outside: it answered 200"):
            run.open()
    assert not (run.run.internal / "public_url").exists()


def test_direct_listens_where_it_is_told_and_is_watched(ways: Callable[..., Opened]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe_socket:
        port = probe_socket.getsockname()[1]
    public = f"http://127.0.0.2:{port}"
    run = ways(DirectExpose(listen=f"127.0.0.2:{port}"), public).open()
    assert run.endpoint.public_now() == public
    run.gateway.body = b"changed"  # the same answer on both sides: still ours
    time.sleep(0.3)
    assert run.endpoint.public_now() == public


def test_direct_without_an_address_says_which_setting(ways: Callable[..., Opened]) -> None:
    with pytest.raises(ConfigError, match="--gateway.public-url"):
        ways(DirectExpose()).open()


def test_direct_by_somebody_elses_forwarding_closes_and_opens_with_it(ways: Callable[..., Opened]) -> None:
    with gate() as forwarding:
        run = ways(DirectExpose(), forwarding.url).open()
        assert run.endpoint.public_now() == forwarding.url
        forwarding.status = 502
        run.look_until(lambda: run.endpoint.public_now() is None)
        forwarding.status = 401
        run.look_until(lambda: run.endpoint.public_now() == forwarding.url)


def test_gradios_link_is_printed_and_ends_with_the_tunnel(tmp_path: Path) -> None:
    package = tmp_path / "gradio"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tunneling.py").write_text("CURRENT_TUNNELS = []\n")
    (package / "networking.py").write_text(
        "import subprocess\nfrom gradio import tunneling\n"
        "class Tunnel: pass\n"
        "def setup_tunnel(local_host, local_port, share_token, share_server_address, share_server_tls_certificate):\n"
        "    tunnel = Tunnel()\n"
        "    tunnel.proc = subprocess.Popen(['sh', '-c', 'echo frpc speaks >&2'], stdout=-1, stderr=-1)\n"
        "    tunneling.CURRENT_TUNNELS.append(tunnel)\n"
        "    return f'https://{local_port}.gradio.live'\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))}
    argv = [sys.executable, "-m", "harness_trainer.expose.gradio_share", "127.0.0.1:8101"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "https://8101.gradio.live\n"
    assert addresses_in(GradioExpose(), done.stdout) == ["https://8101.gradio.live"]
    (package / "networking.py").write_text("raise OSError('no share server')\n")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Gradio opens no share link: no share server" in done.stderr


def test_the_installed_gradio_takes_what_is_given() -> None:
    """Read, not imported: that takes seconds."""
    found = importlib.util.find_spec("gradio")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("gradio is not installed")
    tree = ast.parse(Path(found.submodule_search_locations[0], "networking.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "setup_tunnel")
    names = [argument.arg for argument in function.args.args]
    assert names[:5] == [
        "local_host",
        "local_port",
        "share_token",
        "share_server_address",
        "share_server_tls_certificate",
    ]


def test_sandboxes_elsewhere_without_a_way_are_refused_before_anything_slow() -> None:
    with pytest.raises(ConfigError, match="--gateway.expose cloudflared"):
        require_way_out(RunConfig.model_validate({"sandbox": "e2b"}))
    for gateway in ({"expose": "cloudflared"}, {"public_url": "https://gate.example"}):
        require_way_out(RunConfig.model_validate({"sandbox": "e2b", "gateway": gateway}))
    require_way_out(RunConfig.model_validate({"sandbox": "local"}))
