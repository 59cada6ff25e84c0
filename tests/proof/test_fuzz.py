"""Ten thousand broken requests a dialect: refused in its own words, never a crash, never a hung session."""

import asyncio
import json
import logging
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from capture_proxy.gateway import agent_app
from tests.proof.audit import LedgerEngine, audit
from tests.proof.clients import Wire
from tests.proof.fuzz import Answer, Case, call, cases
from tests.proof.gateways import DIALECTS, bench, check_error

NUM_CASES = 10_000
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))  # another number is another ten thousand
PER_SESSION = 250  # a session of its own for so many, so that no record grows beyond what agents make
PARALLEL = 16
REFUSALS = {400, 401, 403, 404, 405, 413, 415}
COUNT_PATHS = {
    "openai_responses": ["/v1/responses/input_tokens"],
    "anthropic": ["/v1/messages/count_tokens?beta=true"],
    "gemini": ["/v1beta/models/m:countTokens", "/v1beta/models/m:streamGenerateContent"],
}


class Faults(logging.Handler):
    """Collects every record of an error, whoever logged it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.records.append(self.format(record))


def judge(dialect: str, case: Case, answer: Answer | None) -> str | None:
    """What is wrong with the answer; None = nothing."""
    if answer is None:
        return None if case.hangs_up else "no answer"
    if answer.status == 200:
        return _whole(answer)
    if answer.status not in REFUSALS:
        return f"status {answer.status}"
    for shape in [dialect] if case.same_route else DIALECTS:  # elsewhere the headers say who asks, and they may be gone
        try:
            check_error(shape, answer.body, answer.status)
            return None
        except (AssertionError, KeyError, TypeError, ValueError):
            continue
    return None if case.hangs_up or case.method == "HEAD" else "no error of this dialect"


def _whole(answer: Answer) -> str | None:
    try:
        if "event-stream" in answer.headers["content-type"]:
            lines = [line for line in answer.body.split(b"\n") if line.startswith(b"data:")]
            for line in lines:
                if line != b"data: [DONE]":
                    json.loads(line[5:])
            return None if lines else "an empty stream"
        json.loads(answer.body)
    except ValueError as error:
        return f"a reply that is not JSON: {error}"
    return None


def _show(number: int, case: Case, answer: Answer | None, fault: str) -> str:
    seen = answer and (answer.status, answer.body[:300])
    return f"case {number} {case.note} {case.method} {case.path[:80]}: {fault}\n  {case.body[:600]!r}\n  -> {seen}"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_broken_requests_are_refused_and_break_nothing(tmp_path: Path, dialect: str) -> None:
    engine, faults, statuses, wrong = LedgerEngine(["fine"]), Faults(), Counter[int](), list[str]()
    logging.getLogger().addHandler(faults)
    try:
        async with bench(dialect, engine, tmp_path, max_body=2 * 2**20) as b:
            app = agent_app(b.gateway.gateway)
            for start in range(0, NUM_CASES, PER_SESSION):
                session_id = f"s{start}"
                agent = (await b.agent(session_id)).say("hi")
                wire, whole = agent.wire(True), agent.wire(False)
                paths = [wire.path, whole.path, *COUNT_PATHS.get(dialect, [])]
                row = enumerate(
                    islice(cases(dialect, paths, wire.headers, seed=FIRST_SEED + start), PER_SESSION), start
                )

                async def work(row=row, app=app) -> None:  # type: ignore[no-untyped-def]
                    for number, case in row:
                        answer = None
                        try:
                            async with asyncio.timeout(10):
                                answer = await call(app, case)
                            fault = judge(dialect, case, answer)
                        except Exception as error:  # whatever leaves the app is the finding
                            fault = f"{type(error).__name__}: {error}"
                        statuses[answer.status if answer else 0] += 1
                        if fault:
                            wrong.append(_show(number, case, answer, fault))

                async with asyncio.TaskGroup() as group:
                    for _ in range(PARALLEL):
                        group.create_task(work())
                assert not wrong and not faults.records, "\n".join([*wrong[:8], *faults.records[:3]])
                assert (await call(app, _valid(whole))).status == 200, "the session no longer works"
                audit(await b.capture(session_id))
            assert engine.in_flight == 0 and (await b.gateway.admin.stats())["in_flight"] == 0
    finally:
        logging.getLogger().removeHandler(faults)
    assert sum(statuses.values()) == NUM_CASES
    assert statuses[400] > NUM_CASES / 10 and statuses[200] > NUM_CASES / 20, statuses  # both sides are really tried


def _valid(wire: Wire) -> Case:
    return Case(wire.path, [*wire.headers.items()], wire.raw())
