"""E2B sandboxes and a gateway whose public address changes: made for the new one, given up at the old one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandboxes.base import Access, Endpoint, SandboxGone
from tests.sandboxes.e2b_opening import SPEC, open_e2b, records
from tests.sandboxes.e2b_standin import Standin

OLD, NEW = "http://203.0.113.5:443", "http://203.0.113.6:443"


def access(folder: Path) -> Access:
    return Access(gateway=Endpoint("http://127.0.0.1:1", None, OLD, folder / "public_url"))


async def test_a_sandbox_is_made_for_the_address_of_its_moment(standin: Standin, tmp_path: Path) -> None:
    file = tmp_path / "public_url"
    file.write_text(OLD)
    async with open_e2b(standin, tmp_path, access=access(tmp_path)) as backend:
        made_early = backend.sandbox(SPEC)  # an object only: the address is read when it is started
        file.write_text(NEW)
        async with made_early as box:
            assert box.gateway_url == NEW
            await box.renew()
    assert standin.running == [] and records(tmp_path) == []


async def test_a_sandbox_at_an_address_that_is_gone_is_given_up(standin: Standin, tmp_path: Path) -> None:
    file = tmp_path / "public_url"
    file.write_text(OLD)
    async with open_e2b(standin, tmp_path, access=access(tmp_path)) as backend:
        async with backend.sandbox(SPEC) as box:
            file.unlink()
            with pytest.raises(SandboxGone, match="cannot be reached from outside now"):
                await box.renew()
        async with asyncio.timeout(30):
            starting = asyncio.create_task(backend.sandbox(SPEC).__aenter__())
            await asyncio.sleep(0.2)
            assert not starting.done()  # it waits for the tunnel
            file.write_text(NEW)
            box = await starting
            assert box.gateway_url == NEW
            file.write_text(OLD)
            with pytest.raises(SandboxGone, match=f"moved to {OLD}"):
                await box.renew()
            await box.stop()
    assert standin.running == [] and records(tmp_path) == []


async def test_an_address_that_does_not_change_is_never_looked_at_again(standin: Standin, tmp_path: Path) -> None:
    steady = Access(gateway=Endpoint("http://127.0.0.1:1", None, OLD))
    async with open_e2b(standin, tmp_path, access=steady) as backend, backend.sandbox(SPEC) as box:
        assert box.gateway_url == OLD
        await box.renew()
