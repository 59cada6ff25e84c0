"""Who may read a run: the Host, the token, the methods; and what a browser may do with an answer."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from harness_trainer.cli import main
from harness_trainer.cli.view import address_of, find_run
from harness_trainer.errors import RunDirError
from tests.audit.made_run import MadeRun
from tests.view.conftest import client_of


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8765", 200),
        ("localhost:8765", 200),
        ("LOCALHOST.", 200),
        ("run.localhost:1", 200),
        ("[::1]:8765", 200),
        ("10.1.2.3", 200),
        ("box.example:8765", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8765", 421),
        ("evil.example:127.0.0.1", 421),
        ("", 421),
    ],
)
def test_only_a_known_host_is_answered(whole_run: MadeRun, host: str, status: int) -> None:
    client = client_of(whole_run.run, names=["Box.Example"])
    assert client.get("/api/stamp", headers={"host": host}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_served(whole: TestClient, method: str) -> None:
    assert whole.request(method, "/rollouts").status_code == 405
    assert whole.head("/rollouts").status_code == 200


def test_a_page_of_another_site_may_lead_here_and_ask_nothing(whole: TestClient) -> None:
    for dest, status in (("document", 200), ("empty", 403), ("iframe", 403), ("image", 403)):
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-dest": dest}
        assert whole.get("/api/stamp", headers=headers).status_code == status, dest
    assert whole.get("/api/stamp", headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/static/view.js", "/api/stamp", "/nothing", "/static/../app.py", "/api/overview"]
)
def test_every_answer_has_the_policy(whole: TestClient, path: str) -> None:
    headers = whole.get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store" and "access-control-allow-origin" not in headers


def test_a_token_is_taken_from_the_address_into_a_cookie(whole_run: MadeRun) -> None:
    client = client_of(whole_run.run, token="t-é")
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic t-é".encode()}):
        answer = client.get("/rollouts", headers=headers)
        assert answer.status_code == 401 and "printed" in answer.text
    assert client.get("/static/view.js").status_code == 401
    assert client.get("/?token=wrong&token=").status_code == 401
    answer = client.get("/rollouts?outcome=ok&token=t-%C3%A9", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/rollouts?outcome=ok")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "8765" in cookie
    away = client.get("//evil.example/?token=t-%C3%A9", follow_redirects=False).headers["location"]
    assert urlsplit(away).netloc == ""


def test_a_cookie_or_a_header_opens_every_page(whole_run: MadeRun) -> None:
    client = client_of(whole_run.run, token="abc")
    assert client.get("/api/stamp", headers={"authorization": "bearer abc"}).status_code == 200
    assert client.get("/?token=abc").status_code == 200, "after the redirect the cookie is there"
    assert client.get("/rollouts").status_code == 200
    assert client.get("/rollouts", headers={"host": "evil.example"}).status_code == 421
    strange = 'other={"a": 1}; ="; harness-trainer-view-8765=abc'
    fresh = client_of(whole_run.run, token="abc")
    assert fresh.get("/api/stamp", headers={"cookie": strange}).status_code == 200


def test_the_newest_run_is_found(whole_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError, match="give the folder of a run"):
        find_run("latest")
    (tmp_path / "runs").mkdir()
    for name in ("old", "new"):
        whole_run.copy(tmp_path / "runs" / name)
    (tmp_path / "runs/empty").mkdir()
    (tmp_path / "runs/old/config.yaml").touch()
    assert find_run("latest") == Path("runs/old")
    with pytest.raises(RunDirError, match="--wait"):
        find_run("runs/empty")
    assert find_run("runs/empty", wait=True) == Path("runs/empty")
    assert main(["view", "nowhere"]) == RunDirError.exit_code


def test_what_cannot_be_listened_at_is_one_line(whole_run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["view", str(whole_run.run.path), "--port", port]) == 3
        assert "--port" in capsys.readouterr().err
    assert main(["view", str(whole_run.run.path), "--port", "99999"]) == 2
    assert main(["view", str(whole_run.run.path), "--host", "no such host"]) == 2


def test_the_printed_address_opens() -> None:
    assert address_of("0.0.0.0", 80, "t") == "http://127.0.0.1:80/?token=t"
    assert address_of("::1", 80, None) == "http://[::1]:80/"


def test_the_command_serves_until_it_is_interrupted(whole_run: MadeRun) -> None:
    """One real process with a token: prints the address, answers, ends at SIGINT without a traceback."""
    argv = [
        sys.executable,
        "-m",
        "harness_trainer.cli",
        "view",
        str(whole_run.run.path),
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().rpartition(" at ")[2].strip())
        assert address.hostname == "127.0.0.1" and address.port and address.query.startswith("token=")
        statuses = []
        for path in ("/api/overview", f"/api/overview?{address.query}"):
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
            connection.request("GET", path)
            statuses.append(connection.getresponse().status)
            connection.close()
        assert statuses == [401, 303]
        process.send_signal(2)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in said and address.query not in said
