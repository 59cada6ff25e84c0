"""The cost of a turn of a white-box episode: our tool loop and TRL's, side by side in one process, in CPU time.

Both play episodes of 20 turns with a tool that does nothing, on a model that answers at once with the same ids (Qwen3's
real tokenizer and template); neither sends anything over a network. Ours tokenises what is new, records the turn and
commits it to a store on disk; TRL's tokenises the conversation anew at every turn and keeps it in memory. Episodes of
the two alternate, so that whatever else the machine does meets both. Rows an episode are counted twice: for calls that
the model spells as the template would, and for calls that it spells in a way of its own.

    python -m benchmarks.loops [--episodes N] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.template_engine import NoTokenizer, TemplateEngine, npm_tokenizer
from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, SampleEvent
from capture_proxy.pipeline import Pipeline
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store
from capture_proxy.trace import to_row_trace
from capture_proxy.types import SessionPolicy, VersionSpan
from harness_trainer.loops.base import LoopLimits, Message, Scores, Tool, ToolReply, Transcript
from harness_trainer.loops.tool_loop import run_episode
from harness_trainer.rollouts.model_side import ModelSide

GOAL = 0.5
NUM_TURNS = 20
TOLD = "Feedback:\nM O O N S\nG Y X X X\n\nYou have some guesses left."
OPENING: list[Message] = [
    {"role": "system", "content": "You are an expert Wordle solver with deep knowledge of English vocabulary. " * 8},
    {"role": "user", "content": "Use the tool `guess` to make a guess."},
]
THOUGHT = "A first guess."
PLAIN = (
    f'<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "guess", "arguments": {{"word": "moons"}}}}\n</tool_call>'
)
OWN = PLAIN.replace('": ', '":  ')
Episode = Callable[[], Awaitable[int]]  # plays one; gives its rows


async def guess(word: str) -> str:
    """
    Make a guess.

    Args:
        word: The guessed word.

    Returns:
        The feedback.
    """
    return TOLD


class Game:
    """Our side's episode: the one tool, and nothing to earn."""

    done = False
    facts: dict[str, float] = {}  # noqa: RUF012

    def __init__(self) -> None:
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
        self.tools = [Tool("guess", "Make a guess.", parameters, self._guess)]

    async def _guess(self, arguments: dict[str, Any]) -> ToolReply:
        return ToolReply(await guess(**arguments))

    async def start(self) -> list[Message]:
        return OPENING

    async def rewards(self, transcript: Transcript) -> Scores:
        return Scores()


class Answering(TemplateEngine):
    """Answers at once with ids that were made before."""

    def prepare(self, spelling: str) -> tuple[list[int], list[int]]:
        self.num_calls = 0
        self.calling = [*self.encode(spelling), self._reader.end_id]
        self.saying = [*self.encode("I give up."), self._reader.end_id]
        return self.calling, self.saying

    async def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        prompt_ids = request.prompt_ids_P if request.prompt_ids_P is not None else self._render(request)
        over = sum(message["role"] == "tool" for message in request.messages) >= NUM_TURNS - 1
        ids = self.saying if over else self.calling
        self.num_calls += 1
        call = {"name": "guess", "arguments": '{"word": "moons"}'}
        message: Message = {"role": "assistant", "content": "I give up." if over else ""}
        if not over:
            message["reasoning_content"] = THOUGHT
            message["tool_calls"] = [{"id": f"call-{self.num_calls}", "type": "function", "function": call}]
        yield PromptEvent(prompt_ids, request.max_tokens, False, dict(request.sampling))
        yield DeltaEvent(ids, [-0.25] * len(ids))
        yield FinishEvent("stop" if over else "tool_calls", message, [VersionSpan("v1", 0, len(ids))], [], None)


async def ours(stack: AsyncExitStack, tokenizer: Path, spelling: str) -> Episode:
    engine = Answering(tokenizer, lambda k, request: None, "qwen3")  # type: ignore[arg-type, return-value]
    engine.prepare(spelling)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pipeline = Pipeline(
        engine,
        Store.open(folder / "store.sqlite"),
        hang_up_grace_s=0.0,
        bridging=Bridging("auto", "qwen3", tokenizer),
        restarted=False,
    )
    await stack.enter_async_context(pipeline.running())
    await pipeline.bridger.ready()
    side = ModelSide(pipeline, "m")
    num = 0

    async def episode() -> int:
        nonlocal num
        num += 1
        policy = SessionPolicy(sampling={"temperature": 1.0}, max_tokens=256, deadline=time.time() + 600)
        async with side.session(f"s{num}", policy, {}) as session:
            ended = await run_episode(Game(), OPENING, session.endpoint, LoopLimits())
            assert len(ended.transcript.replies) == NUM_TURNS
            return len(to_row_trace(await session.capture()).turns)

    return episode


def trls(tokenizer: Path, spelling: str) -> Episode:
    """TRL's `AsyncRolloutWorker`: what it does for one rollout, with the answer of the engine put in its place."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import add_response_schema, get_training_chat_template, qwen3_chat_template
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    calling, saying = Answering(tokenizer, lambda k, request: None, "qwen3").prepare(spelling)  # type: ignore[arg-type, return-value]
    loop = object.__new__(_AsyncRolloutLoop)  # it is made with an engine, a data set and processes of its own
    loop.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    loop.tokenizer.chat_template = qwen3_chat_template
    loop.tokenizer = add_response_schema(loop.tokenizer)
    loop.chat_template, loop.chat_template_kwargs = get_training_chat_template(loop.tokenizer), {}
    loop.max_tool_calling_iterations, loop._fork_threshold_tokens = None, 0
    loop._counters, loop._rates = defaultdict(float), defaultdict(lambda: [0.0, 0])
    loop._push_rollout_metrics = lambda **metrics: None
    num = 0

    async def answer(prompt_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        nonlocal num
        num += 1
        ids = calling if num % NUM_TURNS else saying
        return list(ids), [-0.25] * len(ids)

    loop._generate_one_turn = answer

    async def episode() -> int:
        _, _, rows, num_calls, *_ = await loop._generate_one(
            OPENING, tool_dict={"guess": guess}, tools=[guess], group_id=0
        )
        assert num_calls == NUM_TURNS - 1
        return len(rows)

    return episode


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds a turn (median and quartiles over episodes), and rows an episode by spelling."""

    median_ms: float
    low_ms: float
    high_ms: float
    rows: tuple[int, int]


async def measured(tokenizer: Path, num_episodes: int) -> tuple[Cost, Cost]:
    """Of our loop and of TRL's."""
    async with AsyncExitStack() as stack:
        sides = [await ours(stack, tokenizer, PLAIN), trls(tokenizer, PLAIN)]
        others = [await ours(stack, tokenizer, OWN), trls(tokenizer, OWN)]
        rows = [(await plain(), await own()) for plain, own in zip(sides, others, strict=True)]
        times: list[list[float]] = [[], []]
        for _ in range(num_episodes):
            for side, taken in zip(sides, times, strict=True):
                began = time.process_time()
                await side()
                taken.append(1e3 * (time.process_time() - began) / NUM_TURNS)
    found = []
    for taken, counted in zip(times, rows, strict=True):
        low, median, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else [taken[0]] * 3
        found.append(Cost(median, low, high, counted))
    return found[0], found[1]


def report(own: Cost, theirs: Cost) -> str:
    """The table, and the goals."""
    lines = [f"{'CPU a turn':<14}{'median':>10}{'quartiles':>18}{'rows an episode':>18}{'own spelling':>14}"]
    for name, cost in (("ours", own), ("TRL's", theirs)):
        spread = f"{cost.low_ms:.2f} to {cost.high_ms:.2f}"
        lines.append(f"{name:<14}{cost.median_ms:>7.2f} ms{spread:>18}{cost.rows[0]:>18}{cost.rows[1]:>14}")
    ratio = own.median_ms / theirs.median_ms
    cheap, whole = ("yes" if reached else "no" for reached in (ratio <= GOAL, own.rows == (1, 1)))
    lines.append(f"cost of a turn, ours / TRL's AsyncRolloutWorker: {ratio:.2f}; goal <= {GOAL}: {cheap}")
    lines.append(
        f"rows an episode of {NUM_TURNS} turns: ours {own.rows[0]}, {own.rows[1]} where calls are spelled in a way of"
        f" their own; TRL's {theirs.rows[0]}, {theirs.rows[1]}; goal ours 1: {whole}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.loops", description=__doc__)
    parser.add_argument("--episodes", type=int, default=200, help="of each loop")
    parser.add_argument("--quick", action="store_true", help="a few episodes, to see that it runs")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*trl.experimental.*")
    try:
        tokenizer = npm_tokenizer("qwen3")
    except NoTokenizer as error:
        print(f"benchmarks.loops: {error}", file=sys.stderr)
        return 2
    own, theirs = asyncio.run(measured(tokenizer, 3 if args.quick else args.episodes))
    print(report(own, theirs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
