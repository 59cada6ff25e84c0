"""The official SDKs in a process of their own that has nothing but an agent's environment: no base URL anywhere."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import TurnStatus
from tests.intercept.intercepting import intercepted, needs_mitmproxy

pytestmark = needs_mitmproxy

OPENAI = """
import json, openai
client = openai.OpenAI(max_retries=0)
ask = dict(model="m", messages=[{"role": "user", "content": "hi"}])
said = [client.chat.completions.create(**ask).choices[0].message.content]
chunks = client.chat.completions.create(**ask, stream=True)
said.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
said.append(client.responses.create(model="m", input="hi", store=False).output_text)
print(json.dumps([said, [m.id for m in client.models.list()]]))
"""
ANTHROPIC = """
import json, anthropic
client = anthropic.Anthropic(max_retries=0)
ask = dict(model="m", max_tokens=50, messages=[{"role": "user", "content": "hi"}])
said = [client.messages.create(**ask).content[0].text]
with client.messages.stream(**ask) as stream:
    said.append("".join(stream.text_stream))
said.append(client.beta.messages.create(**ask).content[0].text)
print(json.dumps([said, [m.id for m in client.models.list()]]))
"""
GENAI = """
import json
from google import genai
client = genai.Client()
ask = dict(model="m", contents="hi")
said = [client.models.generate_content(**ask).text]
said.append("".join(part.text or "" for part in client.models.generate_content_stream(**ask)))
said.append(client.models.generate_content(**ask).text)
print(json.dumps([said, [m.name.removeprefix("models/") for m in client.models.list()]]))
"""


async def run(script: str, env: dict[str, str], folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **env},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()[-2000:]
    return out.decode()


@pytest.mark.parametrize(
    ("script", "variable", "dialects"),
    [
        (OPENAI, "OPENAI_API_KEY", ["openai_chat", "openai_chat", "openai_responses"]),
        (ANTHROPIC, "ANTHROPIC_API_KEY", ["anthropic"] * 3),
        (GENAI, "GEMINI_API_KEY", ["gemini"] * 3),
    ],
    ids=["openai", "anthropic", "google-genai"],
)
async def test_an_sdk_without_any_configuration_is_captured(
    tmp_path: Path, script: str, variable: str, dialects: list[str]
) -> None:
    engine = ScriptedEngine([Reply(["hello ", "there"])], model="scripted")
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        env = {**behind.proxy.agent_env(session.token), variable: "a key of the agent's own"}
        said, models = json.loads(await run(script, env, tmp_path))
        assert said == ["hello there"] * 3
        assert models == ["scripted"]
        turns = await behind.turns(session)
        assert [turn.dialect for turn in turns] == dialects
        assert all(turn.status is TurnStatus.OK and turn.completion_ids_T for turn in turns)
        assert behind.events() == []


async def test_a_process_with_an_agents_environment_still_reaches_its_own_servers(tmp_path: Path) -> None:
    script = """
import http.server, threading, httpx
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(httpx.get(f"http://localhost:{server.server_port}/").status_code)
"""
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        assert (await run(script, behind.proxy.agent_env("sk-1"), tmp_path)).strip() == "200"
        assert behind.events() == []
