"""The real opencode from npm, set up for a vendor's own API with a key of its own, behind the proxy."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import TurnStatus
from harness_trainer.cache import cache_dir
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from tests.intercept.intercepting import intercepted, needs_mitmproxy

pytestmark = [
    needs_mitmproxy,
    pytest.mark.opencode,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, opencode cannot be installed"),
]


@pytest.fixture(scope="module")
def opencode_bin() -> Path:
    return ensure_installed(load_harness("opencode"), cache_dir(), print)


def settings(provider: str) -> dict[str, Any]:
    """A person's opencode.json: a provider by name, no base URL."""
    limit = {"context": 100_000, "output": 2048}
    return {
        "share": "disabled",
        "autoupdate": False,
        "snapshot": False,
        "lsp": False,
        "model": f"{provider}/smol",
        "small_model": f"{provider}/smol",
        "enabled_providers": [provider],
        "permission": "allow",
        "agent": {"title": {"disable": True}},
        "provider": {provider: {"models": {"smol": {"name": "smol", "limit": limit, "tool_call": True}}}},
    }


@pytest.mark.parametrize(
    ("provider", "key", "dialect"),
    [
        ("openai", "OPENAI_API_KEY", "openai_responses"),
        ("anthropic", "ANTHROPIC_API_KEY", "anthropic"),
        ("google", "GOOGLE_GENERATIVE_AI_API_KEY", "gemini"),
    ],
)
async def test_a_task_is_done_and_captured_without_a_base_url(
    tmp_path: Path, opencode_bin: Path, provider: str, key: str, dialect: str
) -> None:
    app = tmp_path / "app"
    app.mkdir()

    def script(request: ChatRequest) -> Reply:
        if request.messages[-1]["role"] == "tool":
            return Reply("The moon is written.")
        arguments = {"filePath": str(app / "answer.txt"), "content": "café moon"}
        return Reply(["I will ", "write it."], tool_calls=[("write", arguments)])

    engine = ScriptedEngine(script, version="v2")
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        env = {
            **behind.proxy.agent_env(session.token),
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            key: "a key of the agent's own",
            "OPENCODE_CONFIG_CONTENT": json.dumps(settings(provider)),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }
        process = await asyncio.create_subprocess_exec(
            str(opencode_bin / "opencode"),
            *("run", "--format", "json"),
            cwd=app,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(b"Write the moon."), 120)
        assert process.returncode == 0, err.decode()[-2000:]
        assert (app / "answer.txt").read_text() == "café moon"
        assert "The moon is written." in out.decode()
        first, second = await behind.turns(session)
        refused = {event["detail"] for event in behind.events()}
    assert {first.dialect, second.dialect} == {dialect}
    assert first.status is second.status is TurnStatus.OK
    sampled = first.prompt_ids_P + first.completion_ids_T
    assert second.prompt_ids_P[: len(sampled)] == sampled
    # It looks for a plugin of its own at each start, on a host that is neither a provider's nor allowed.
    assert len(refused) <= 1 and all(detail.endswith(":443 CONNECT") for detail in refused)
