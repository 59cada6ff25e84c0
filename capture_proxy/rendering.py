"""Token in, token out: the prompt of a request that extends a recorded turn, as that turn's exact ids and what is new.

Owns when a prompt is bridged, the proof by ids that comes first, and the thread that the library `renderers` runs in.
Which turn is extended is told by `history`, what a family puts between by `families`; what is not bridged the engine
renders itself, and `graph` sees the fork. Called by `turn` before a request goes to the engine; also the reader of
replies for an engine that has no parser for its family.

**Proof.** The recorded part needs none: it is what the engine had and sampled. What is put after it must be the end of
the engine's own rendering of the same request. Asked once for each shape (tools or none, template arguments, the roles
that are new); until it held, and for a shape where it did not, the engine's rendering is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from capture_proxy.engines.base import ChatRequest, Engine, Example, TextSplitter
from capture_proxy.errors import CaptureError, FamilyError
from capture_proxy.families import EXAMPLE_TOOL, ROOT, Family, load
from capture_proxy.gate import Gate
from capture_proxy.history import History, Match, NoMatch, has_reply, shape
from capture_proxy.types import Finding, Severity

_log = logging.getLogger(__name__)
_MAX_SHAPES = 1024
_NO_IDS = "the engine takes no token ids: start it with --enable-scale-out"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bridging:
    """How prompts are continued.

    Whatever the mode, a prompt that cannot be continued is rendered by the engine, with the reason on its turn.

    `mode` "auto" bridges what was proven by ids, "always" bridges whatever the renderer can without asking the engine
    for proof (and waits for the renderer), "never" leaves every prompt to the engine. `renderer` is a family's name,
    "auto" (whichever renders as the engine does) or "none". `tokenizer` None = the folder that the engine names as its
    model. `thinking_retention` "all" keeps earlier reasoning in the prompt also when a new user message comes: the
    sampled tokens stay one row. "tool_cycle" leaves such a prompt to the engine, whose template may drop the reasoning.
    """

    mode: Literal["auto", "always", "never"] = "auto"
    renderer: str = "auto"
    tokenizer: Path | None = None
    thinking_retention: Literal["all", "tool_cycle"] = "all"
    load: Callable[..., Family] = load  # as `families.load`; takes a second, runs in the renderer's thread


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as it goes to the engine, and what a turn records about its prompt."""

    request: ChatRequest
    bridged_from: str | None = None  # as in Turn.bridged_from
    refusal: str | None = None  # as in Turn.bridge_refusal
    findings: tuple[Finding, ...] = ()


class Bridger:
    """Bridges prompts for the sessions of one gateway and one engine."""

    def __init__(self, engine: Engine, config: Bridging | None = None, gate: Gate | None = None) -> None:
        self._engine = engine
        self._gate = gate or Gate()
        self.config = config or Bridging()
        # One thread: tokenizers are not made for several, and a long render must not hold up the loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rendering")
        self._loading: asyncio.Task[Family] | None = None
        self._takes_ids: bool | None = None  # None = the engine was not asked yet
        self._proven: dict[tuple[Any, ...], str | None] = {}  # shape -> None = proven, else why not
        self._tail_dropped: dict[tuple[Any, ...], int] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads the renderer in the background; calls that come before it is there are rendered by the engine.

        In mode "always" it is waited for. Raises FamilyError when there is none to be had then.
        """
        if self.config.mode != "never" and self.config.renderer != "none":
            self._loading = asyncio.create_task(self._load(), name="load-renderer")
            self._loading.add_done_callback(self._loaded)
        try:
            if self._loading is not None and self.config.mode == "always":
                await self._loading
            yield
        finally:
            if self._loading is not None:
                self._loading.cancel()
                await asyncio.wait([self._loading])
            self._thread.shutdown(wait=False, cancel_futures=True)

    def may_continue(self) -> bool:
        """Whether any prompt may ever be continued: what came before is worth keeping only then."""
        if self._loading is None or self._takes_ids is False:
            return False
        return not self._loading.done() or isinstance(self._family(), Family)

    async def ready(self) -> str | None:
        """Waits until the renderer is there; gives the family's name, or None when there is none to be had."""
        if self._loading is None:
            return None
        await asyncio.wait([self._loading])
        family = self._family()
        return family.name if isinstance(family, Family) else None

    async def prepare(self, history: History, request: ChatRequest) -> Prepared:
        """The request with its exact prompt ids if it extends a recorded turn, else as it is, with the reason.

        Never raises for a prompt that cannot be bridged: the engine then renders it, and says what is wrong with it.
        """
        if self.config.mode == "never":
            return Prepared(request)
        try:
            self._takes_ids = await self._engine.takes_ids()
            if not self._takes_ids:
                return Prepared(request, refusal=_NO_IDS if has_reply(request.messages) else None)
        except CaptureError as error:
            return Prepared(request, refusal=str(error))
        if not self.may_continue():
            return Prepared(request, refusal=str(self._family()) if has_reply(request.messages) else None)
        key = shape(request.tools, request.chat_template_kwargs, request.tool_choice)
        found = history.find(request.messages, key, request.request_id)
        if found is None:
            return Prepared(request)
        if isinstance(found, NoMatch):
            return Prepared(request, refusal=found.reason)
        if any(_has_media(message) for message in request.messages):
            return Prepared(request, refusal="the prompt holds more than text")
        if self.config.mode == "always":
            await self.ready()
        family = self._family()
        if isinstance(family, str):
            return Prepared(request, refusal=family)
        try:
            new_ids = await self._run(lambda: family.extend(found, request.tools, request.chat_template_kwargs))
        except CaptureError as error:
            return Prepared(request, refusal=str(error))
        return await self._prove(family, found, request, new_ids)

    async def _prove(self, family: Family, match: Match, request: ChatRequest, new_ids: list[int]) -> Prepared:
        key = _shape_key(request, match)
        known = len(match.prompt_ids_P) + len(match.completion_ids_T)
        optional = family.optional_tail
        if self.config.mode == "always":
            dropped = len(optional) if optional and new_ids[-len(optional) :] == optional else 0
        elif key in self._proven:
            if (why := self._proven[key]) is not None:
                return Prepared(request, refusal=why, findings=(_unproven(why),))
            dropped = self._tail_dropped.get(key, 0)
        else:
            try:
                wanted = await self._engine.render(replace(request, prompt_ids_P=None))
            except CaptureError as error:  # sampling will raise it again, where it belongs
                return Prepared(request, refusal=f"unproven: the engine could not render the request: {error}")
            dropped, why = _compare(new_ids, wanted, optional, known)
            if why is not None and not family.closes(match.completion_ids_T):
                # A reply that was cut off is closed in more than one way; it says nothing about the shape.
                return Prepared(request, refusal=why)
            if len(self._proven) >= _MAX_SHAPES:  # template arguments come from agents
                self._proven.clear()
            self._proven[key], self._tail_dropped[key] = why, dropped
            if why is not None:
                _log.warning("prompts like that of %s are rendered anew: %s", request.request_id, why)
                return Prepared(request, refusal=why, findings=(_unproven(why),))
        new_ids = new_ids[: len(new_ids) - dropped]
        prompt_ids = match.prompt_ids_P + match.completion_ids_T + new_ids
        return Prepared(replace(request, prompt_ids_P=prompt_ids), bridged_from=match.turn_id)

    # --- the reader of replies (engines.base.ReplyReader)

    async def splitter(self, prompt_ids: list[int]) -> TextSplitter:
        return await self._run(lambda: self._loaded_family().splitter(prompt_ids))

    async def read(
        self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Finding]]:
        return await self._run(lambda: self._loaded_family().read(prompt_ids, completion_ids, tools))

    async def example(self) -> Example:
        return await self._run(lambda: self._loaded_family().example())

    # --- loading

    def _family(self) -> Family | str:
        """The family, or why there is none (yet)."""
        if self._loading is None:
            return "no renderer is configured"
        if not self._loading.done():
            return "the renderer is still loading"
        if self._loading.cancelled():
            return "the gateway stops"
        error = self._loading.exception()
        return self._loading.result() if error is None else f"no renderer: {error}"

    def _loaded_family(self) -> Family:
        family = self._family()
        if isinstance(family, str):
            raise FamilyError(family)
        return family

    async def _load(self) -> Family:
        path = self.config.tokenizer or await self._engine_folder()
        asked: tuple[Any, ...] = (self.config.renderer, path, self.config.thinking_retention)
        if self.config.renderer == "auto":
            # A gateway that is started while the engine is away must not do without a renderer for good.
            roots = [await self._gate.patiently(partial(self._root, tools)) for tools in ([], [EXAMPLE_TOOL])]
            asked += (tuple(roots),)
        family = await self._run(lambda: self.config.load(*asked))
        self._engine.read_with(self)
        return family

    async def _root(self, tools: list[dict[str, Any]]) -> tuple[int, ...]:
        """The engine's rendering of a small request, to tell the family by."""
        # "none" is what also a server without a tool parser renders; the tools are part of the prompt either way.
        request = ChatRequest("", ROOT, tools, "none" if tools else None, {}, None)
        return tuple(await self._engine.render(request))

    async def _engine_folder(self) -> Path:
        """The folder that the engine serves from, if this process can read it. Raises FamilyError."""
        for model in await self._engine.models():
            root = model.get("root")
            if isinstance(root, str) and await self._run(Path(root).is_dir):
                return Path(root)
        raise FamilyError("the engine's model is no folder that the gateway can read: give --tokenizer its folder")

    def _loaded(self, task: asyncio.Task[Family]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            foreseen = isinstance(error, CaptureError)
            asked_for = self.config.renderer != "auto" or self.config.tokenizer is not None
            level = logging.ERROR if not foreseen else logging.WARNING if asked_for else logging.INFO
            _log.log(level, "prompts are not continued by ids: %s", error, exc_info=None if foreseen else error)

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content)


def _shape_key(request: ChatRequest, match: Match) -> tuple[Any, ...]:
    """What the ids between two replies depend on, apart from the texts."""
    roles: list[str] = []
    for message in match.new_messages:
        role = str(message.get("role"))
        role = f"{role}s" if roles and roles[-1] in (role, f"{role}s") else role
        if role.endswith("s") and roles and roles[-1] == role[:-1]:
            roles[-1] = role
        elif not roles or roles[-1] != role:
            roles.append(role)
    kwargs = json.dumps(request.chat_template_kwargs, sort_keys=True, default=str)
    return bool(request.tools), request.tool_choice == "none", kwargs, *roles


def _compare(new_ids: list[int], wanted: list[int], optional: list[int], known: int) -> tuple[int, str | None]:
    """(how many of the last ids the engine leaves out, why the rest is not the end of its rendering or None)."""
    for dropped in range(len(optional) + 1):
        if dropped and new_ids[-dropped:] != optional[len(optional) - dropped :]:
            break
        ours = new_ids[: len(new_ids) - dropped]
        if ours and wanted[-len(ours) :] == ours:
            return dropped, None
    if optional and new_ids[-len(optional) :] == optional and wanted[-len(optional) :] != optional:
        new_ids = new_ids[: -len(optional)]
    theirs = wanted[-len(new_ids) :]
    back = next((i for i, (a, b) in enumerate(zip(new_ids[::-1], theirs[::-1], strict=False)) if a != b), len(theirs))
    at = known + len(new_ids) - 1 - back
    ours_id = new_ids[len(new_ids) - 1 - back] if back < len(new_ids) else None
    theirs_id = theirs[len(theirs) - 1 - back] if back < len(theirs) else None
    return 0, f"unproven: at position {at} the renderer has token {ours_id}, the engine's template {theirs_id}"


def _unproven(why: str) -> Finding:
    return Finding(Severity.WARN, "bridging_unproven", why)
