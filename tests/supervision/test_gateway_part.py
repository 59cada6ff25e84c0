"""The gateway as a part of a run: a real one, killed, started again, told when the engine has a policy."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from capture_proxy.admin_client import AdminClient
from capture_proxy.types import SessionPolicy
from harness_trainer.errors import GatewayFailed
from harness_trainer.supervision.gateway import Gateway
from sandboxes.lifecycle import OwnedProcess, start_process

KEY = "key"
HELD, ASKED = "the engine has no policy yet", "the engine does not answer"


class Started:
    """A gateway whose engine is never there: what its calls say shows whether they got as far as asking it."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "capture_proxy", "--engine-url", "http://127.0.0.1:9", "--bridging", "never"]
        self.gateway = Gateway(
            [*command, "--store", str(folder / "store.sqlite"), *argv],
            self._spawn,
            key=KEY,
            port=0,
            ready_file=folder / "ready.json",
            log=folder / "gateway.log",
        )
        self.processes: list[OwnedProcess] = []

    def _spawn(self, argv: list[str]) -> OwnedProcess:
        self.processes.append(
            start_process(
                argv,
                env={**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY},
                cwd=self.folder,
                log_path=self.folder / "gateway.log",
                registry=self.folder / "owned",
                kind="gateway",
            )
        )
        return self.processes[-1]

    async def call(self) -> str:
        """What a call of an agent is answered."""
        async with AdminClient(self.gateway.addresses["admin_url"], KEY) as admin:
            token = (await admin.mint("s", SessionPolicy(), {})).token
        async with httpx.AsyncClient(base_url=self.gateway.addresses["agent_url"], trust_env=False) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            headers = {"authorization": f"Bearer {token}"}
            return (await http.post("/v1/chat/completions", json=body, headers=headers)).text


@pytest.fixture
def started(tmp_path):
    started = Started(tmp_path)
    yield started
    for process in started.processes:
        process.stop(0.0)


def call(started: Started) -> str:
    return asyncio.run(started.call())


def test_a_gateway_holds_until_it_is_told_and_again_after_it_was_killed_at_the_same_addresses(started):
    gateway = started.gateway
    process = gateway.launch()
    addresses = dict(gateway.addresses)
    assert HELD in call(started)
    gateway.release()
    assert ASKED in call(started)
    gateway.hold()
    assert HELD in call(started)
    gateway.release()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    process.stop(0.0)
    gateway.release()  # to nobody: the supervisor has not seen it yet
    gateway.launch()
    assert gateway.addresses == addresses
    assert HELD in call(started), "it knows nothing of what the one before it was told"
    gateway.release()
    assert ASKED in call(started)


def test_a_gateway_that_does_not_answer_is_ended_rather_than_left_open(started):
    gateway = started.gateway
    process = gateway.launch()
    gateway.release()
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(pid), signal.SIGSTOP)
    gateway.hold()
    assert not process.alive()


def test_a_launch_that_is_given_up_or_dies_says_so_and_leaves_nothing(started, tmp_path):
    started.gateway.give_up()
    with pytest.raises(GatewayFailed, match="stopped while it started"):
        started.gateway.launch()
    broken = Started(tmp_path, "--no-such-flag")
    with pytest.raises(GatewayFailed, match=r"the gateway died: .*no-such-flag"):
        broken.gateway.launch()
    assert not any(process.alive() for process in started.processes + broken.processes)
