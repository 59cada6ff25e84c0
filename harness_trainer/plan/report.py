"""A plan as people read it, and as programs do. Owns words and layout, no number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness_trainer.plan import Plan
from harness_trainer.plan.amounts import Number, Part, total
from harness_trainer.plan.pace import ADVICE
from harness_trainer.plan.sizes import gib

# Unit and meaning of each number of a `Workload`, and the flag that gives it.
ABOUT = {
    "turns": ("calls", "model calls of a rollout"),
    "first_prompt": ("tokens", "prompt of its first call"),
    "new_tokens": ("tokens", "that each later call adds"),
    "reply_tokens": ("tokens", "sampled in one call"),
    "agent_s": ("s", "of a rollout outside the engine"),
    "engine_s": ("s", "of a rollout inside model calls"),
    "forwarded": ("tokens", "of a rollout through the learner, shared ones once"),
    "kept": ("share", "of the groups that are trained"),
    "call_tokens_s": ("tokens/s", "that one call is sampled at"),
    "engine_tokens_s": ("tokens/s", "that the engine samples at most"),
    "prefill_tokens_s": ("tokens/s", "of prompts that it reads at most"),
    "learner_tokens_s": ("tokens/s", "through the learner, forward and backward"),
    "step_s": ("s", "of a step beside those: optimizer, weight update"),
}


def lines(plan: Plan) -> Iterator[str]:
    """The whole plan as text."""
    yield from _model(plan)
    yield from _memory("Engine, on each of its GPUs" if plan.device == "cuda" else "Engine", _engine_parts(plan))
    yield from _learner(plan)
    yield from _verdict(plan)
    yield from _pace(plan)
    yield from _sources(plan)
    yield from _costs(plan)
    yield from _numbers(plan)


def _model(plan: Plan) -> Iterator[str]:
    shape = plan.shape
    size = "an unknown number of" if shape.parameters is None else f"{shape.parameters / 1e6:,.1f} M"
    active = ""
    if shape.active is not None and shape.active != shape.parameters:
        active = f", {shape.active / 1e6:,.1f} M of them for one token"
    yield f"Model {shape.name}: {size} parameters{active}"
    for what in shape.unknown:
        yield f"  unknown: {what}"


def _engine_parts(plan: Plan) -> list[Part]:
    return [*plan.engine.fixed, plan.engine.cache]


def _memory(title: str, parts: Sequence[Part]) -> Iterator[str]:
    yield ""
    yield f"{title}: {gib(total(parts))}"
    for part in parts:
        yield f"  {part.name:<22}{gib(part.bytes):>12}   {part.how}"


def _learner(plan: Plan) -> Iterator[str]:
    memory, processes = plan.learner, plan.config.learner.num_processes
    who = "one process" if processes == 1 else f"each of {processes} processes"
    yield ""
    yield f"Learner, {who}: {gib(memory.peak)} at the peak"
    for title, parts in (("stays", memory.resident), ("backward", memory.backward), ("optimizer", memory.update)):
        yield f"  {title}: {gib(total(parts))}" + ("" if title == "stays" else " on top, the larger of the two")
        for part in parts:
            yield f"    {part.name:<20}{gib(part.bytes):>12}   {part.how}"


def _verdict(plan: Plan) -> Iterator[str]:
    yield ""
    said = {True: "yes", False: "NO", None: "unknown"}[plan.fit.fits]
    yield f"Fits: {said}"
    for note in plan.fit.notes:
        yield f"  {note}"


def _pace(plan: Plan) -> Iterator[str]:
    pace, load, hour = plan.pace, plan.load, plan.rollouts_per_hour
    sampled, read, trained = (_product(hour, of) for of in (load.sampled, load.prefilled, load.forwarded.value))
    steps = plan.config.learner.max_steps
    yield ""
    yield f"Steps per hour: {_amount(pace.per_hour)}; hours for {steps} steps: {_amount(plan.hours)}"
    yield f"  rollouts per hour    {_amount(hour)} ({_amount(pace.rollouts_per_step)} a step)"
    yield f"  a rollout            {_amount(pace.rollout_s)} s; {pace.in_flight} at a time"
    if plan.nodes is not None:
        yield f"  nodes                {plan.nodes.line}"
    yield f"  sandboxes per hour   {_amount(plan.sandboxes_per_hour)}"
    yield f"  tokens per hour      sampled {_amount(sampled)}, prompts {_amount(read)}, trained on {_amount(trained)}"
    yield "  a step takes at least, by what holds it:"
    for name, seconds in pace.bounds.items():
        yield f"    {name:<12}{_amount(seconds):>10} s"
    if pace.bottleneck is None:
        unknown = [name for name, number in load.items() if number.value is None]
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        yield f"  bottleneck: unknown. Not known: {', '.join(unknown)}; give {flags}, --gpu, or --from-run"
    else:
        yield f"  bottleneck: {pace.bottleneck}. What helps: {ADVICE[pace.bottleneck.partition(' ')[0]]}"
    yield "  not in these hours: starting up, evaluations, what is slower than its bound"


def _sources(plan: Plan) -> Iterator[str]:
    if len(plan.sources) == 1:
        return
    yield ""
    yield "Sources, a rollout of each"
    for one in plan.sources:
        load, hour = one.load, _product(plan.rollouts_per_hour, one.share)
        limit = "" if one.at_once is None else f", at most {one.at_once} at a time"
        yield (
            f"  {one.name:<18}{one.share:>5.0%} of the groups, {_amount(hour)} rollouts per hour{limit}; "
            f"{_amount(load.turns.value)} calls, {_amount(load.sampled)} tokens, {_amount(one.rollout_s)} s, "
            f"{one.sandboxes} sandboxes ({one.kind})"
        )


def _costs(plan: Plan) -> Iterator[str]:
    if plan.prices is None:
        return
    yield ""
    yield f"Cost in {plan.prices.currency}"
    for cost in plan.costs:
        fits = {True: "fits", False: "does NOT fit", None: "unknown whether it fits"}[cost.fits]
        yield f"  {cost.flavor:<20}{_amount(cost.hours):>10} h{_amount(cost.total):>12}   {fits}"


def _numbers(plan: Plan) -> Iterator[str]:
    yield ""
    yield "Numbers this rests on" + (", means over all sources" if len(plan.sources) > 1 else "")
    for name, number in plan.load.items():
        unit, about = ABOUT[name]
        why = f": {number.why}" if number.why else ""
        yield f"  {name:<18}{_amount(number.value):>10} {unit:<9}{number.source}{why}  [{about}]"
    assumed = [name for name, number in plan.load.items() if number.source == "assumed"]
    if assumed:
        yield f"Assumed, so check them: {', '.join(assumed)}"


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second


def _amount(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def as_json(plan: Plan) -> dict[str, Any]:
    """The same for programs: bytes, seconds, hours; null = not known."""
    return {
        "model": {"name": plan.shape.name, "parameters": plan.shape.parameters, "unknown": list(plan.shape.unknown)},
        "engine": {"bytes": plan.engine.needed, "parts": _parts(_engine_parts(plan)), "calls": plan.engine.num_calls},
        "learner": {
            "bytes": plan.learner.peak,
            "stays": _parts(plan.learner.resident),
            "backward": _parts(plan.learner.backward),
            "optimizer": _parts(plan.learner.update),
        },
        "fits": plan.fit.fits,
        "notes": plan.fit.notes,
        "steps_per_hour": plan.pace.per_hour,
        "hours": plan.hours,
        "rollouts_per_hour": plan.rollouts_per_hour,
        "sandboxes_per_hour": plan.sandboxes_per_hour,
        "at_once": plan.pace.in_flight,
        "nodes": None if plan.nodes is None else {"places": plan.nodes.places, "found": plan.nodes.line},
        "sources": [
            {
                "name": one.name,
                "share": one.share,
                "kind": one.kind,
                "at_once": one.at_once,
                "sandboxes": one.sandboxes,
                "sampled_tokens": one.load.sampled,
                "rollout_s": one.rollout_s,
            }
            for one in plan.sources
        ],
        "bounds_s": plan.pace.bounds,
        "bottleneck": plan.pace.bottleneck,
        "costs": [{"flavor": c.flavor, "fits": c.fits, "hours": c.hours, "total": c.total} for c in plan.costs],
        "numbers": {name: _number(number) for name, number in plan.load.items()},
    }


def _parts(parts: Sequence[Part]) -> dict[str, int | None]:
    return {part.name: part.bytes for part in parts}


def _number(number: Number) -> dict[str, Any]:
    return {"value": number.value, "source": number.source, "why": number.why}
