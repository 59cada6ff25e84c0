"""The viewer's addresses: each page, and the same data as JSON under `/api` (docs/view.md).

Owns routing and what an error looks like. Handlers are plain functions, which Starlette runs in threads: reading a
store blocks. Nothing here writes. Made by `cli.view`, behind `guard.Guard`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from harness_trainer.errors import ConfigError, RunDirError
from harness_trainer.rundir import RunDir
from harness_trainer.view import attempts, kept
from harness_trainer.view.export import TooLarge, trace_json
from harness_trainer.view.overview import Overview
from harness_trainer.view.pages import Pages, quoted
from harness_trainer.view.reading import Missing, reading
from harness_trainer.view.settings import Settings, shown, without_secrets
from harness_trainer.view.traces import Traces, UnknownRollout
from harness_trainer.view.visible import as_text, to_json

_log = logging.getLogger(__name__)
_STATUS: dict[type[Exception], int] = {
    UnknownRollout: 404,
    FileNotFoundError: 404,
    ConfigError: 400,
    TooLarge: 413,
    RunDirError: 503,
}


def make_app(run: RunDir) -> Starlette:
    """The pages of one run, whether or not it has begun."""
    view = _View(run)
    one, call = "/rollouts/{rollout}", "/rollouts/{rollout}/calls/{call:int}"
    pages: dict[str, Callable[[Request], Response]] = {
        "/": view.overview,
        "/rollouts": view.rollouts,
        "/groups": view.groups,
        "/settings": view.settings,
        "/logs": view.logs,
        "/logs/{file:path}": view.log,
        one: view.rollout,
        call: view.call,
        call + "/sampled": view.sampled,
        call + "/prompt": view.prompt,
        one + "/rows/{row:int}": view.row,
        one + "/files/{file:path}": view.file,
    }
    data: dict[str, Callable[[Request], Any]] = {
        "/stamp": lambda request: {"stamp": view.state.stamp()},
        "/overview": lambda request: view.state.look(),
        "/steps": lambda request: {"steps": view.state.steps()},
        "/rollouts": view.some_rollouts,
        "/groups": view.some_groups,
        one: lambda request: view.traces.facts(_rollout(request)),
        one + "/calls": lambda request: {"calls": view.traces.turns(_rollout(request))},
        call: lambda request: view.traces.turn(*_call(request), whole=_whole(request)),
        call + "/messages/{key}": view.message,
        call + "/sampled": lambda request: view.traces.sampled(*_call(request), _offset(request)),
        call + "/prompt": lambda request: view.traces.prompt(*_call(request), _offset(request)),
        one + "/rows": lambda request: view.traces.rows(_rollout(request)),
        one + "/rows/{row:int}": lambda request: view.traces.row(*_row(request), _offset(request)),
    }
    routes: list[BaseRoute] = [Route(path, page) for path, page in pages.items()]
    routes += [Route(f"/api{one}/trace", view.trace)]
    routes += [Route("/api" + path, _as_json(answer)) for path, answer in data.items()]
    routes += [Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"))]
    handlers = dict.fromkeys((*_STATUS, HTTPException, Exception), view.error)
    return Starlette(routes=routes, exception_handlers=handlers)


class _View:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._pages = Pages()
        self._settings = Settings(run.config)
        self.state = Overview(run, self._settings)
        self.traces = Traces(run)

    # -- pages ---------------------------------------------------------------------------------------------------

    def overview(self, request: Request) -> Response:
        of, curves = self.state.look(), self.state.curves()
        logs = {file.name for file in kept.files_in(self._run.logs)}
        return self._page(request, "overview.html", of=of, curves=curves, logs=logs, live=True)

    def rollouts(self, request: Request) -> Response:
        query = _query(request)
        found = self.some_rollouts(request)
        return self._page(
            request, "rollouts.html", found=found, query=query, outcomes=attempts.OUTCOMES, live="before" not in query
        )

    def groups(self, request: Request) -> Response:
        query = _query(request)
        found = self.some_groups(request)
        objective = self._settings.read().objective
        estimator = None if objective is None else objective.advantage
        return self._page(
            request, "groups.html", found=found, query=query, states=attempts.GROUP_STATES, estimator=estimator,
            live="before" not in query,
        )  # fmt: skip

    def settings(self, request: Request) -> Response:
        text = yaml.safe_dump(shown(self._settings.read().data), sort_keys=False, allow_unicode=True)
        return self._page(request, "text.html", title="Settings", text=text, about="config.yaml, secrets masked")

    def logs(self, request: Request) -> Response:
        return self._page(request, "logs.html", files=kept.files_in(self._run.logs))

    def log(self, request: Request) -> Response:
        return self._file(request, self._run.logs, f"/logs/{_path_of(request)}", None)

    def rollout(self, request: Request) -> Response:
        rollout_id = _rollout(request)
        of = self.traces.facts(rollout_id)
        calls, rows = self.traces.turns(rollout_id), self.traces.rows(rollout_id)
        tail = self._verifier_tail(rollout_id)
        return self._page(
            request, "rollout.html", of=of, calls=calls, rows=rows, verifier=tail, live=of["finished_at"] is None
        )

    def call(self, request: Request) -> Response:
        rollout_id, index = _call(request)
        of = self.traces.turn(rollout_id, index, whole=_whole(request))
        return self._page(request, "call.html", of=of, rollout=rollout_id)

    def sampled(self, request: Request) -> Response:
        rollout_id, index = _call(request)
        found = self.traces.sampled(rollout_id, index, _offset(request))
        return self._tokens(request, found, f"{quoted(rollout_id)}/calls/{index}/sampled", "Sampled tokens")

    def prompt(self, request: Request) -> Response:
        rollout_id, index = _call(request)
        found = self.traces.prompt(rollout_id, index, _offset(request))
        return self._tokens(request, found, f"{quoted(rollout_id)}/calls/{index}/prompt", "Prompt tokens")

    def row(self, request: Request) -> Response:
        rollout_id, number = _row(request)
        found = self.traces.row(rollout_id, number, _offset(request))
        return self._tokens(request, found, f"{quoted(rollout_id)}/rows/{number}", "Training row")

    def _tokens(self, request: Request, found: dict[str, Any], path: str, title: str) -> Response:
        return self._page(request, "tokens.html", found=found, path=f"/rollouts/{path}", title=title)

    def file(self, request: Request) -> Response:
        rollout_id, name = _rollout(request), _path_of(request)
        self.traces.facts(rollout_id)  # the folder's name is then one of ours
        return self._file(request, self.traces.folder(rollout_id), f"/rollouts/{rollout_id}/files/{name}", rollout_id)

    def _file(self, request: Request, folder: Path, title: str, rollout_id: str | None) -> Response:
        start = request.query_params.get("start")
        part = kept.read_part(folder, _path_of(request), None if start is None else _number(start))
        mask = None if rollout_id is None else self.traces.mask_of(rollout_id)
        text = without_secrets(part.text) if mask is None else mask(part.text)
        return self._page(request, "file.html", title=title, part=part, text=text)

    def _verifier_tail(self, rollout_id: str) -> str | None:
        try:
            text = kept.read_part(self.traces.folder(rollout_id), "verifier.log").text[-4000:]
        except FileNotFoundError:
            return None
        mask = self.traces.mask_of(rollout_id)
        return text if mask is None else str(mask(text))

    def _page(self, request: Request, name: str, *, live: bool = False, **values: Any) -> Response:
        fragment = "fragment" in request.query_params
        run = self._run.path.name
        return _html(self._pages.render(name, fragment=fragment, run=run, live=live, as_text=as_text, **values))

    # -- data ----------------------------------------------------------------------------------------------------

    def some_rollouts(self, request: Request) -> dict[str, Any]:
        try:
            with reading(self._run.store) as db:
                return attempts.rollouts(db, _query(request))
        except Missing:
            return {"rollouts": [], "next": None}

    def some_groups(self, request: Request) -> dict[str, Any]:
        objective = self._settings.read().objective
        try:
            with reading(self._run.store) as db:
                return attempts.groups(db, _query(request), objective)
        except Missing:
            return {"groups": [], "next": None}

    def message(self, request: Request) -> dict[str, Any]:
        return self.traces.message(*_call(request), request.path_params["key"], _offset(request))

    def trace(self, request: Request) -> Response:
        body = trace_json(self.traces, _rollout(request), request.query_params.get("form", "rows"))
        return Response(body, media_type="application/json")

    # -- errors --------------------------------------------------------------------------------------------------

    def error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else _status_of(error)
        if status == 500:
            _log.error("%s failed in an unforeseen way", request.url.path, exc_info=error)
            error = HTTPException(500, f"the viewer failed ({type(error).__name__}): its terminal says where")
        said = error.detail if isinstance(error, HTTPException) else str(error.args[0] if error.args else error)
        if str(request.scope["path"]).startswith("/api/"):
            return Response(to_json({"error": said}), status, media_type="application/json")
        page = self._pages.render("error.html", run=self._run.path.name, live=status == 503, status=status, said=said)
        return _html(page, status)


def _status_of(error: Exception) -> int:
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def _html(text: str, status: int = 200) -> Response:
    # `visible` leaves nothing that cannot be encoded; names of files may still hold what no text does.
    return HTMLResponse(text.encode("utf-8", "replace"), status)


def _as_json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        return Response(to_json(answer(request)), media_type="application/json")

    return endpoint


def _query(request: Request) -> Mapping[str, str]:
    return {name: value for name, value in request.query_params.items() if name != "fragment" and value != ""}


def _rollout(request: Request) -> str:
    return str(request.path_params["rollout"]).encode("utf-8", "replace").decode()


def _call(request: Request) -> tuple[str, int]:
    return _rollout(request), int(request.path_params["call"])


def _row(request: Request) -> tuple[str, int]:
    return _rollout(request), int(request.path_params["row"])


def _path_of(request: Request) -> str:
    return str(request.path_params["file"])


def _whole(request: Request) -> bool:
    return request.query_params.get("whole") == "1"


def _offset(request: Request) -> int:
    return _number(request.query_params.get("offset", "0"))


def _number(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or len(value) > 15:
        raise ConfigError(f"{value[:40]!r} is no place in a text or a row")
    return int(value)
