"""Templates of the E2B stand-in: the finished ones, and builds whose steps really run (their base image does not
matter, it is always the stand-in's own). A part of `e2b_standin`."""

from __future__ import annotations

import asyncio
import io
import os
import re
import secrets
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.sandboxes.e2b_standin_box import USERS, Box, make_root


@dataclass
class Template:
    """`root` None = a bare system. A build's `status`: waiting, building, ready, error."""

    template_id: str
    names: list[str]
    root: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str = "user"
    workdir: str = "/home/user"
    status: str = "ready"
    reason: str = ""
    logs: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)  # of the build request
    start: dict[str, Any] = field(default_factory=dict)  # steps and base


class Templates:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all = {"base": Template("base0", ["base"])}
        self.uploads: dict[str, bytes] = {}
        self.hang = False  # a build never ends
        self._builds: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Template | web.Response:
        """What to make a sandbox of, or the refusal."""
        for template in self.all.values():
            if name == template.template_id or name in template.names:
                if template.status == "ready":
                    return template
                return web.json_response({"code": 400, "message": f"template '{name}' has no build"}, status=400)
        return web.json_response({"code": 404, "message": f"template '{name}' not found"}, status=404)

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if request.method == "POST" and path == "/v3/templates":
            return self._request(await request.json())
        if found := re.fullmatch(r"/templates/aliases/([^/]+)", path):
            known = [t for t in self.all.values() if found[1] in t.names]
            if not known:
                return web.json_response({"code": 404, "message": "alias not found"}, status=404)
            return web.json_response({"templateID": known[0].template_id, "public": False})
        if found := re.fullmatch(r"/templates/([^/]+)/files/([^/]+)", path):
            url = str(request.url.with_path(f"/upload/{found[2]}"))
            return web.json_response({"present": found[2] in self.uploads, "url": url}, status=201)
        if found := re.fullmatch(r"/upload/([^/]+)", path):
            self.uploads[found[1]] = await request.read()
            return web.Response()
        if found := re.fullmatch(r"/v2/templates/([^/]+)/builds/([^/]+)", path):
            return await self._build(self.all[found[1]], await request.json())
        if found := re.fullmatch(r"/templates/([^/]+)/builds/([^/]+)/status", path):
            return self._status(self.all[found[1]], int(request.query.get("logsOffset", 0)))
        return web.json_response({"code": 404, "message": f"no route {path}"}, status=404)

    def _request(self, body: dict[str, Any]) -> web.Response:
        template_id = secrets.token_hex(8)
        for older in self.all.values():
            if body["name"] in older.names:
                older.names.remove(body["name"])
        self.all[template_id] = Template(template_id, [body["name"]], status="waiting", body=body)
        answer = {"templateID": template_id, "buildID": "b1", "public": False, "tags": [], "aliases": []}
        return web.json_response({**answer, "names": [body["name"]]}, status=202)

    def _status(self, template: Template, offset: int) -> web.Response:
        entry = {"timestamp": "2026-01-01T00:00:00Z", "level": "info"}
        body = {
            "templateID": template.template_id,
            "buildID": "b1",
            "status": template.status,
            "logs": [],
            "logEntries": [{**entry, "message": line} for line in template.logs[offset : offset + 100]],
        }
        return web.json_response({**body, **({"reason": {"message": template.reason}} if template.reason else {})})

    async def _build(self, template: Template, start: dict[str, Any]) -> web.Response:
        template.start = start
        template.status = "building"
        task = asyncio.create_task(self._work(template))
        self._builds.add(task)
        task.add_done_callback(self._builds.discard)
        return web.Response(status=202)

    async def _work(self, template: Template) -> None:
        root = self._folder / template.template_id
        make_root(root)
        box = Box(root)
        user, workdir = "root", "/"
        try:
            await box.start()
            for step in template.start["steps"]:
                kind, args = step["type"], step["args"]
                template.logs.append(f"[{kind}] {' '.join(args)}")
                if kind == "USER":
                    user = args[0]
                elif kind == "WORKDIR":
                    workdir = os.path.join(workdir, args[0])
                    box.where(workdir).mkdir(parents=True, exist_ok=True)
                elif kind == "ENV":
                    template.env.update(zip(args[::2], args[1::2], strict=True))
                elif kind == "COPY":
                    self._copy(box, self.uploads[step["filesHash"]], args, workdir)
                elif kind == "RUN":
                    await self._run(box, template, args, user, workdir)
            template.root, template.user, template.workdir = root, user, workdir
            while self.hang:
                await asyncio.sleep(0.05)
            template.status = "ready"
        except RuntimeError as e:
            template.reason, template.status = str(e), "error"
        finally:
            await box.stop()

    async def _run(self, box: Box, template: Template, args: list[str], user: str, workdir: str) -> None:
        who = args[1] if len(args) > 1 and args[1] else user
        argv = ["/bin/bash", "-l", "-c", args[0]]
        process = await box.run(argv, user=who, cwd=workdir, env=template.env, stdin=False)
        out, err = await process.communicate()
        template.logs += [*out.decode().splitlines(), *err.decode().splitlines()]
        if process.returncode:
            raise RuntimeError(f"failed to run command '{args[0]}': exit status {process.returncode}")

    def _copy(self, box: Box, data: bytes, args: list[str], workdir: str) -> None:
        source, dest, who, mode = args[0], os.path.join(workdir, args[1]), args[2] or "root", args[3]
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = archive.getmembers()
            single = len(members) == 1 and members[0].isfile() and not args[1].endswith("/")
            for member in members:
                below = os.path.relpath(member.name, source) if member.name != source else os.path.basename(source)
                target = box.where(dest) if single else box.where(os.path.join(dest, below))
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                elif (file := archive.extractfile(member)) is not None:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read())
                    os.chmod(target, int(mode, 8) if mode else member.mode)
                    os.chown(target, USERS[who][0], USERS[who][1])
