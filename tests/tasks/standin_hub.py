"""A Hugging Face Hub on this machine: as much of it as `huggingface_hub` asks when it downloads a dataset.

Speaks repository info, tree listings, and file downloads with the headers that the client reads (ETag, X-Repo-Commit,
X-Error-Code, redirects of large files to a store of their own), and can play what goes wrong there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.http_serving import in_thread

LARGE = 1000  # bytes from which a file lies in the store of large files, as LFS has it


@dataclass
class Hub:
    """`datasets` maps a repository to its revisions, newest last, and those to files by path.

    Example: Hub({"acme/tasks": {"a" * 40: {"hello/task.toml": b""}}}).
    """

    datasets: dict[str, dict[str, dict[str, bytes]]]
    tags: dict[str, str] = field(default_factory=dict)  # name -> commit
    gated: set[str] = field(default_factory=set)  # repositories that need the token
    token: str = "hf_good"
    broken: int = 0  # answer everything with this status
    asked: list[str] = field(default_factory=list)  # "GET /path" of every request
    url: str = ""
    store_url: str = ""  # of large files; another host, or the client would take it for a renamed repository

    def commit(self, repo: str, revision: str) -> str | None:
        commits = self.datasets[repo]
        if revision in commits:
            return revision
        return list(commits)[-1] if revision == "main" else self.tags.get(revision)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        the_hub = hub

    with in_thread(Handler) as port:
        hub.url = f"http://127.0.0.1:{port}"
        hub.store_url = f"http://localhost:{port}"
        yield hub


class _Handler(BaseHTTPRequestHandler):
    the_hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.the_hub, urlsplit(self.path).path
        hub.asked.append(f"{self.command} {unquote(path)}")
        if hub.broken:
            return self._send(hub.broken, b"the Hub has a bad day")
        if path.startswith("/large/"):
            return self._large(path.removeprefix("/large/"))
        kind, _, rest = path.strip("/").partition("/")
        if kind == "api":
            _, _, rest = rest.partition("/")
        owner, name, action, rest = [*rest.split("/", 3), "", "", ""][:4]
        repo = f"{owner}/{name}"
        if repo not in hub.datasets:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        revision, file = map(unquote, rest.partition("/")[::2])  # a slash within a revision is written %2F
        commit = hub.commit(repo, revision or "main")
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = hub.datasets[repo][commit]
        if action == "resolve":
            return self._file(commit, files.get(file))
        if action == "tree":
            return self._json([_entry(name, data) for name, data in files.items()])
        return self._json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _file(self, commit: str, data: bytes | None) -> None:
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if len(data) >= LARGE:
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            return self._send(302, b"", headers | {"Location": f"{self.the_hub.store_url}/large/{digest}"})
        return self._send(200, data, headers)

    def _large(self, digest: str) -> None:
        commits = [commit for repo in self.the_hub.datasets.values() for commit in repo.values()]
        stored = {hashlib.sha256(data).hexdigest(): data for files in commits for data in files.values()}
        self._send(200, stored[digest], {"ETag": f'"{digest}"'})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if len(data) >= LARGE:
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
    return entry
