"""A Hugging Face Hub on this machine with Jobs, as much of it as the client asks: real HTTP, real processes as jobs.

A job runs its command as a process with its variables and secrets, and its output is its log, unless the test plays the
job by hand (`Standin.plays`). What goes wrong at the real service can be played too. Repositories are
`standin_repos`'.
"""

from __future__ import annotations

import email.utils
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.http_serving import in_thread
from tests.jobs.standin_repos import Repos

TOKEN, USER = "hf_standin_token", "me"
FLAVORS = {
    "cpu-basic": (None, 0.0002),
    "a10g-large": ({"type": "gpu", "model": "A10G", "quantity": "1", "vram": "24 GB", "manufacturer": "Nvidia"}, 0.025),
}


@dataclass
class Job:
    """`spec` is what was sent, secrets included; the service never shows those again."""

    id: str
    spec: dict[str, Any]
    owner: str
    created: datetime
    stage: str = "SCHEDULING"
    message: str | None = None
    started: datetime | None = None
    lines: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def log(self, *lines: str) -> None:
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def set(self, stage: str, message: str | None = None) -> None:
        with self.changed:
            self.stage, self.message = stage, message
            if stage == "RUNNING":
                self.started = datetime.now(UTC)
            self.changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self.stage in ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass
class Standin:
    """`cut_after`: the stream of a log breaks off after so many lines, each number once. `plays` = jobs are by hand."""

    plays: bool = True
    folder: Path = Path(".")  # where jobs run
    repos: Repos = field(default_factory=Repos)
    jobs: dict[str, Job] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    forgets: int = 0  # first lines of a log that the service no longer has
    refuses: tuple[int, str] | None = None  # answer to whoever starts a job
    broken: int = 0  # so many answers of any kind are 503
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def job(self) -> Job:
        """The newest."""
        return list(self.jobs.values())[-1]


@contextmanager
def serving(standin: Standin) -> Iterator[Standin]:
    class Handler(_Handler):
        hub = standin

    with in_thread(Handler) as port:
        standin.url = f"http://127.0.0.1:{port}"
        standin.repos.url = standin.url
        standin.repos.store_url = f"http://localhost:{port}"
        try:
            yield standin
        finally:
            for job in standin.jobs.values():
                _end(job)
                job.set("DELETED")


class _Handler(BaseHTTPRequestHandler):
    hub: Standin
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(parts.path)
        hub.asked.append(f"{self.command} {path}")
        if hub.broken > 0:
            hub.broken -= 1
            return self.send(503, {"error": "the Hub has a bad day"})
        if path.startswith("/store/"):  # signed addresses: no token
            return hub.repos.store(self, path.removeprefix("/store/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            return self.send(200, {"type": "user", "name": USER, "orgs": [{"name": "acme"}]})
        if path == "/api/jobs/hardware":
            return self.send(200, [_hardware(name, *what) for name, what in FLAVORS.items()])
        if path.startswith("/api/jobs/"):
            return self._jobs(path.removeprefix("/api/jobs/").split("/"), dict(parse_qsl(parts.query)), body)
        return hub.repos.answer(self, parts.path, body)

    def _jobs(self, words: list[str], query: dict[str, str], body: bytes) -> None:
        hub, owner = self.hub, words[0]
        if len(words) == 1 and self.command == "POST":
            return self._start(owner, json.loads(body))
        if len(words) == 1:
            wanted = query.get("label")
            labels = [None if wanted is None else tuple(wanted.split("=", 1))]
            return self.send(
                200, [self._info(job) for job in hub.jobs.values() if labels[0] in (None, *job.spec["labels"].items())]
            )
        job = hub.jobs.get(words[1])
        if job is None or job.owner != owner:
            return self.send(404, {"error": "Job not found"})
        action = words[2] if len(words) > 2 else ""
        if action == "logs":
            return self._logs(job)
        if action == "cancel":
            _end(job)
            job.set("CANCELED", "canceled by its owner")
        self.send(200, self._info(job))

    def _start(self, owner: str, spec: dict[str, Any]) -> None:
        hub = self.hub
        if hub.refuses is not None:
            return self.send(hub.refuses[0], {"error": hub.refuses[1]})
        if spec["flavor"] not in FLAVORS:
            return self.send(400, {"error": f'Invalid flavor: "{spec["flavor"]}"'})
        job = Job(f"{len(hub.jobs) + 1:024x}", spec, owner, datetime.now(UTC))
        hub.jobs[job.id] = job
        if not hub.plays:
            threading.Thread(target=_run, args=(hub, job), daemon=True).start()
        self.send(200, self._info(job))

    def _info(self, job: Job) -> dict[str, Any]:
        ports = job.spec.get("expose", {}).get("ports", [])
        return {
            "id": job.id,
            "createdAt": _iso(job.created),
            "startedAt": None if job.started is None else _iso(job.started),
            "dockerImage": job.spec.get("dockerImage"),
            "command": job.spec["command"],
            "arguments": [],
            "environment": job.spec["environment"],
            "secrets": dict.fromkeys(job.spec.get("secrets", {}), ""),
            "flavor": job.spec["flavor"],
            "labels": job.spec.get("labels"),
            "volumes": job.spec.get("volumes"),
            "expose": job.spec.get("expose"),
            "status": {
                "stage": job.stage,
                "message": job.message,
                "exposeUrls": [f"https://{job.id}--{port}.hf.jobs" for port in ports] or None,
            },
            "owner": {"id": "1", "name": job.owner, "type": "user"},
        }

    def _logs(self, job: Job) -> None:
        """Server-sent events from the log's start until the job is over, or the stream is to break off."""
        cut = self.hub.cut_after.pop(0) if self.hub.cut_after else None
        self.send_response(200)
        for name, value in {
            "Content-Type": "text/event-stream",
            "Transfer-Encoding": "chunked",
            "Date": email.utils.formatdate(usegmt=True),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self._event("===== Job started at now =====")
        at = self.hub.forgets
        for sent in itertools.count():
            with job.changed:
                while at >= len(job.lines) and not job.is_over:
                    job.changed.wait(5.0)
                if at >= len(job.lines):
                    break
                line = job.lines[at]
            if cut is not None and sent >= cut:
                self.close_connection = True
                self.connection.shutdown(2)  # in the middle of a chunked body
                return
            self._event(line)
            at += 1
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        data = f"data: {json.dumps({'data': text, 'timestamp': _iso(datetime.now(UTC))})}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def send(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        for name, text in {"Content-Length": str(len(data)), "Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _run(hub: Standin, job: Job) -> None:
    """The job as a process: what a container has of variables, and its output line by line."""
    spec = job.spec
    folder = hub.folder / job.id
    folder.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "JOB_ID": job.id, "HF_ENDPOINT": hub.url}
    env |= {"HF_HUB_DISABLE_XET": "1", **spec["environment"], **spec.get("secrets", {})}
    job.process = subprocess.Popen(
        spec["command"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    job.set("RUNNING")
    assert job.process.stdout is not None
    for line in job.process.stdout:
        job.log(line.rstrip("\n"))
    code = job.process.wait()
    if not job.is_over:
        job.set("COMPLETED" if code == 0 else "ERROR", None if code == 0 else f"exit code {code}")


def _end(job: Job) -> None:
    """SIGTERM, and SIGKILL a while later."""
    if job.process is not None and job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 20
        while job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        job.process.kill()


def _hardware(name: str, accelerator: dict[str, str] | None, price: float) -> dict[str, Any]:
    return {
        "name": name,
        "prettyName": name,
        "cpu": "12 vCPU",
        "ram": "46 GB",
        "accelerator": accelerator,
        "unitCostMicroUSD": round(price * 1e6),
        "unitCostUSD": price,
        "unitLabel": "minute",
    }


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
