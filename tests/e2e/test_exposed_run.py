"""A run whose gateway is opened to the outside: the tunnel is a part of it like any other, and ends with it."""

import json
import sys
from pathlib import Path

from test_rollout_command import Command, TextEngine, serving


def test_a_run_opens_its_gateway_proves_it_and_closes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    tunnel = f"{sys.executable} -m tests.expose.playing_tunnel {{port}} {tmp_path}"
    with serving(TextEngine()) as engine:
        command = Command(tmp_path, "--engine-url", engine.url, "--num-groups", 1)
        code, _, err = command.run("--gateway.expose", "command", "--gateway.expose.command", tunnel)
    assert code == 0, err
    events = [json.loads(line) for line in (command.run_dir / "events.jsonl").read_text().splitlines()]
    (exposed,) = [event for event in events if event["kind"] == "gateway_exposed"]
    assert exposed["url"].startswith("http://127.0.0.2:") and f"reach the gateway at {exposed['url']}" in err
    assert [event["part"] for event in events if event["kind"] == "started"] == ["gateway", "tunnel", "runner"]
    assert {event["part"] for event in events if event["kind"] == "stopped"} == {"gateway", "tunnel", "runner"}
    assert not (command.run_dir / "internal" / "public_url").exists()
    assert command.processes() == []
