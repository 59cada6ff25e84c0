"""Model repositories of the stand-in Hub: creation, large files, commits on a parent, trees, downloads.

As small as the client's own calls allow. Large files lie in a store of their own, at signed addresses, as LFS has it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

LARGE = 1000  # bytes from which a file is a large one


class Handler(Protocol):
    command: str

    def send(self, status: int, value: object, headers: dict[str, str] | None = None) -> None: ...


@dataclass
class Repos:
    """`commits` of each repository, oldest first: id -> files by path."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    url: str = ""
    store_url: str = ""  # another host, or the client would take it for a renamed repository
    refuses: int = 0  # so many commits are answered 500
    forgets: int = 0  # so many commits are made, and answered 504
    about: dict[str, tuple[str, str]] = field(default_factory=dict)  # commit -> title and description

    def head(self, repo: str) -> str:
        return list(self.commits[repo])[-1]

    def files(self, repo: str) -> dict[str, bytes]:
        return self.commits[repo][self.head(repo)]

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """A commit, by anybody."""
        name = hashlib.sha1(f"{repo}{len(self.commits.get(repo, {}))}".encode()).hexdigest()
        self.commits.setdefault(repo, {})[name] = files
        return name

    def answer(self, to: Handler, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            return self._create(to, json.loads(body))
        if path == "/api/validate-yaml":
            return to.send(200, {"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(to, json.loads(body))
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            words = words[2:]
        repo, action, rest = "/".join(words[:2]), (words[2:] or [""])[0], [unquote(word) for word in words[3:]]
        if repo not in self.commits:
            return to.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if action == "preupload":
            return self._modes(to, repo, json.loads(body))
        if action == "commit":
            return self._commit(to, repo, body)
        revision = rest[0] if rest else "main"
        commit = self.head(repo) if revision == "main" else revision
        if commit not in self.commits[repo]:
            return to.send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = self.commits[repo][commit]
        if action == "commits":
            return self._log(to, repo, commit)
        if action == "tree":
            return self._tree(to, files, "/".join(rest[1:]))
        if action == "resolve":
            return self._file(to, commit, files.get("/".join(rest[1:])))
        to.send(200, {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files], "private": True})

    def _create(self, to: Handler, wanted: dict[str, Any]) -> None:
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repo in self.commits:
            return to.send(409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"})
        self.add(repo, {".gitattributes": b""})
        to.send(200, {"url": f"{self.url}/{repo}"})

    def _modes(self, to: Handler, repo: str, wanted: dict[str, Any]) -> None:
        there = self.files(repo)
        to.send(
            200,
            {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["size"] >= LARGE else "regular",
                        "shouldIgnore": False,
                        "oid": _oid(there[one["path"]]) if one["path"] in there else None,
                    }
                    for one in wanted["files"]
                ]
            },
        )

    def _batch(self, to: Handler, wanted: dict[str, Any]) -> None:
        objects = []
        for one in wanted["objects"]:
            actions = {"upload": {"href": f"{self.store_url}/store/{one['oid']}", "header": {}}}
            objects.append(one | ({} if one["oid"] in self.large else {"actions": actions}))
        to.send(200, {"transfer": "basic", "objects": objects})

    def store(self, to: Handler, name: str, body: bytes) -> None:
        if to.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == name
            self.large[name] = body
            return to.send(200, b"")
        to.send(200, self.large[name], {"ETag": f'"{name}"'})

    def _commit(self, to: Handler, repo: str, body: bytes) -> None:
        if self.refuses > 0:
            self.refuses -= 1
            return to.send(500, {"error": "Internal error"})
        files, about = dict(self.files(repo)), ("", "")
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, self.head(repo)):
                return to.send(412, {"error": "A commit has happened since. Please refresh and try again."})
            if line["key"] == "header":
                about = value["summary"], value.get("description", "")
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        name = self.add(repo, files)
        self.about[name] = about
        if self.forgets > 0:
            self.forgets -= 1
            return to.send(504, {"error": "Gateway time-out"})
        to.send(200, {"commitUrl": f"{self.url}/{repo}/commit/{name}", "commitOid": name, "pullRequestUrl": None})

    def _log(self, to: Handler, repo: str, commit: str) -> None:
        names = list(self.commits[repo])
        found = []
        for name in reversed(names[: names.index(commit) + 1]):
            title, message = self.about.get(name, ("", ""))
            date = "2026-01-01T00:00:00.000Z"
            found.append({"id": name, "authors": [], "date": date, "title": title, "message": message})
        to.send(200, found)

    def _tree(self, to: Handler, files: dict[str, bytes], folder: str) -> None:
        found = [_entry(name, data) for name, data in files.items() if not folder or name.startswith(f"{folder}/")]
        if folder and not found:
            return to.send(404, {"error": f"{folder} does not exist"}, {"X-Error-Code": "EntryNotFound"})
        to.send(200, found)

    def _file(self, to: Handler, commit: str, data: bytes | None) -> None:
        if data is None:
            return to.send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"'}
        if len(data) >= LARGE:
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            return to.send(302, b"", headers | {"Location": f"{self.store_url}/store/{digest}"})
        to.send(200, data, headers)


def _oid(data: bytes) -> str:
    """What the Hub compares a file by: git's id of a small one, the SHA-256 of a large one."""
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": _oid(data), "size": len(data), "pointerSize": 130}
    return entry
