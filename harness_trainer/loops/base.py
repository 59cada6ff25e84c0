"""The contract of white-box loops: rollouts whose turns we own, on environments that offer tools.

Owns the nouns that a loop, an environment and the model meet in, and the errors that say whose fault an end is. Below
is what a new kind of environment implements (`Environment`, `Episode`), what drives it (`tool_loop`, through `Model`),
and what `rollouts` sees of all of it, a person's own loop included (`Source`).

Whose fault. What a tool raises is the tool's reply to the model, and the rollout goes on. `EpisodeLost` is the
machinery's: the rollout is an infra failure and is tried again from its start. `EnvironmentFault` is a person's (an
address, a class, a row), and another try fails alike. Raised while a source is opened it ends the run, with what to do
about it; raised in a rollout it is a set-up failure of that task, as `SetupFailure` is: after some of them the task is
drawn no more (quarantine), and the rest of the run goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from harness_trainer.errors import HarnessTrainerError
from harness_trainer.tasks import Task

ROW = "row"  # key of `Task.metadata` that holds the dataset's row: every column, the prompt included

Message: TypeAlias = dict[str, Any]  # OpenAI chat: {"role": ..., "content": text or parts, ...}
Content: TypeAlias = str | list[dict[str, Any]]  # text, or OpenAI content parts ({"type": "text" | "image_url", ...})


class EnvironmentFault(HarnessTrainerError):
    """An environment, its settings or a row of its data cannot be used; the message says what to do."""

    exit_code = 2


class EpisodeLost(Exception):
    """The machinery lost the episode: session or server gone, no capacity left. Nothing of it is trained."""


class NoPlace(EpisodeLost):
    """The source was just found to bear fewer episodes than are open: `max_episodes` fell, and this is one too many.

    Raised before the model is asked anything. The rollout then waits for a place and plays from its start.
    """


class SetupFailure(Exception):
    """An episode of this task cannot be set up: `reset` raised, say. A second try will most likely fail alike."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered. Example: Reply({"role": "assistant", "content": "hi"}, "stop", 12, 2, "g1-0-0000")."""

    message: Message  # role "assistant", with "tool_calls" if it calls any; goes back into the next call unchanged
    finish_reason: str | None  # "stop", "length" or "tool_calls"
    num_prompt_tokens: int  # of this call's whole prompt; 0 = the engine did not say
    num_completion_tokens: int  # sampled by this call
    turn_id: str  # of the recorded turn
    prompt_ids: Sequence[int] = ()  # the exact ids; () = the engine gives none
    completion_ids: Sequence[int] = ()


class Model(Protocol):
    """The policy, for one rollout. Every call is recorded, and is trained if the rollout is."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Reply:
        """One call with the whole conversation. `tools`: OpenAI function specs; sampling that the run pins stays.

        Raises SessionClosed when a budget of the rollout is spent (let it through: the rollout is then truncated),
        PromptTooLong when the conversation fills the window, BadRequest for what is no request, EngineError.
        """
        ...

    async def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """How many tokens the prompt of this call would have. Nothing is sampled or recorded."""
        ...


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What the model is told of a call. Example: ToolReply("G U E S S"), ToolReply("no such word", failed=True)."""

    content: Content
    failed: bool = False  # for the counts: the tool raised, or could not be called
    done: bool = False  # the episode is over: the model is not asked again


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of one episode. `call` gets the model's arguments as a JSON object.

    It may raise anything: EpisodeLost and EnvironmentFault end the rollout, all else is the tool's reply to the model.
    When the rollout is cancelled `call` is cancelled; it must then leave nothing running that nobody waits for.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments, an object
    call: Callable[[dict[str, Any]], Awaitable[ToolReply]]

    def spec(self) -> dict[str, Any]:
        """As OpenAI's chat API offers it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(slots=True)
class Transcript:
    """A conversation so far, as reward functions are shown it.

    Example: Transcript([user], [assistant calls echo, tool says, assistant], [reply, reply]).
    """

    prompt: list[Message]  # the opening messages
    completion: list[Message] = field(default_factory=list)  # all that came after: the model's and the tools'
    replies: list[Reply] = field(default_factory=list)  # one per call, in order

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.completion]


@dataclass(frozen=True, slots=True)
class Scores:
    """What an episode earned. Example: Scores({"won": 1.0, "greens": None}).total == 1.0."""

    by_name: Mapping[str, float | None] = field(default_factory=dict)  # None = this one says nothing, which is not 0
    weights: Mapping[str, float] = field(default_factory=dict)  # of those that do not count once
    awaits_group: bool = False  # more is said when its whole group has ended (`GroupRewards`): there is no total yet

    @property
    def total(self) -> float | None:
        """The weighted sum of those that say something; None = nothing scored the episode, or not all yet."""
        if self.awaits_group:
            return None
        said = [self.weights.get(name, 1.0) * value for name, value in self.by_name.items() if value is not None]
        return sum(said) if said else None


class Episode(Protocol):
    """One game. Made for one rollout by `Environment.episode`, closed when that context ends."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Of this very episode; complete once `start` has returned."""
        ...

    @property
    def done(self) -> bool:
        """The environment says that it is over: the model is not asked again. False where it cannot tell."""
        ...

    @property
    def facts(self) -> Mapping[str, float]:
        """Numbers for the metrics of this source, by name; read after `rewards`."""
        ...

    async def start(self) -> list[Message]:
        """Set it up, once; the opening messages, with what the environment said. Raises EpisodeLost."""
        ...

    async def rewards(self, transcript: Transcript) -> Scores:
        """Called once, when the loop is over and the episode still open."""
        ...


class Environment(Protocol):
    """A source of episodes; an async context manager that is open for one run of the runner.

    `name` is the source's in metrics and in `RolloutResult.harness`; `max_episodes` what it can have open at once,
    None = it does not say. Both are known once it is open; `max_episodes` may fall when more is learned (`NoPlace`).
    """

    @property
    def name(self) -> str: ...

    @property
    def max_episodes(self) -> int | None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def tasks(self) -> list[Task]:
        """One per row, the row in `metadata[ROW]`; names are unique. Raises EnvironmentFault."""
        ...

    def episode(self, task: Task, rollout_id: str) -> AbstractAsyncContextManager[Episode]:
        """A fresh episode. Entering it raises EpisodeLost where there is no place for one, NoPlace if one will be."""
        ...


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """What bounds one rollout's loop, beside the session's own limits and the rollout's clock (`Stages`)."""

    max_completion_tokens: int | None = None  # of the episode: all that comes after its first prompt; None = no cap
    max_tool_calling_iterations: int | None = None  # rounds of tool calls; None = as many as the session allows
    max_tokens: int | None = None  # what the session lets one call sample; None = no cap
    max_tool_chars: int = 100_000  # of one tool's reply; the rest is cut, and the model told
    tool_timeout_s: float | None = None  # of one tool call; None = the rollout's clock
    start_timeout_s: float = 300.0  # to get an episode and to set it up
    images: bool = False  # whether the model takes images; else each becomes a note


class Stages(Protocol):
    """A rollout's clock, as a source needs it (`rollouts.budget.Budget`). Stages: create, setup, agent, verify, stop.

    A stage that outlasts its limit is an infra failure, so what may end sooner by the policy's own doing (its turns,
    its tools) is to be ended by the loop, at `agent_s`.
    """

    stage: str  # the one at work; of a rollout that failed, where it did

    @property
    def agent_s(self) -> float:
        """What the turns may take from now on, so that they can still be scored."""
        ...

    @property
    def tests_s(self) -> float:
        """What scoring may take from now on."""
        ...

    @property
    def left_s(self) -> float: ...

    def timed(self, name: str, limit_s: float | None = None) -> AbstractAsyncContextManager[None]: ...


# Gives the rollout's model, once, when its first turn begins: what the turns may take counts from there.
Begin: TypeAlias = Callable[[], Awaitable[Model]]


@dataclass(slots=True)
class ToolUse:
    """What a loop of ours saw of its tool calls.

    Example: ToolUse(num_rounds=2, seconds={"guess": 0.4}, num_ran={"guess": 3}) is 3 calls in 2 turns, 0.13 s each.
    """

    num_rounds: int = 0  # turns whose calls were answered
    num_unknown: int = 0  # calls by a name that no tool of the episode has
    exhausted: bool = False  # the model wanted another round than the limit allows
    seconds: dict[str, float] = field(default_factory=dict)  # spent in the tools that ran, by name
    num_ran: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Played:
    """What a source made of one rollout, for `rollouts.white_box` to judge.

    Example: Played("stop", Scores({"won": 1.0}), num_calls={"guess": 6}, num_failures={"guess": 1}).
    """

    how: str  # "stop", "done", "failed", or the limit that was met: "length", "deadline", `SessionClosed.limit`, ...
    scores: Scores = field(default_factory=Scores)  # a total of None = unscored, out of the baseline
    failure: str = ""  # of "failed": what the person's own loop raised
    # Tool calls by name, as the model named it, and those that were answered with an error; None = nobody counted.
    num_calls: dict[str, int] | None = None
    num_failures: dict[str, int] | None = None
    tool_use: ToolUse | None = None  # None = nobody watched
    facts: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # what a person should know of this rollout, a line each


@dataclass(frozen=True, slots=True)
class GroupScore:
    """What an episode earned beside its siblings. Example: GroupScore(Scores({"rank": 0.5}), {"mean_length": 41.0})."""

    scores: Scores
    facts: Mapping[str, float] = field(default_factory=dict)  # what the functions logged


class GroupRewards(Protocol):
    """Rewards of episodes that can only be told beside their siblings'. What is needed of each is kept until then.

    Of a rollout whose `Scores` said `awaits_group`: either it is scored with its group or it is dropped.
    """

    async def score(self, rollout_ids: Sequence[str]) -> list[GroupScore]:
        """Of these siblings, in this order, once. Raises what makes all of them unknown."""
        ...

    async def drop(self, rollout_ids: Sequence[str]) -> None:
        """Give back what is kept of them, if anything is. Takes seconds at most, and raises nothing."""
        ...


class Source(Protocol):
    """What `rollouts` runs: an environment under the tool loop, or a person's own loop. Open for one run."""

    @property
    def name(self) -> str: ...

    @property
    def max_episodes(self) -> int | None: ...

    @property
    def group_rewards(self) -> GroupRewards | None:
        """None = each rollout is scored by itself."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def tasks(self) -> list[Task]: ...

    async def play(self, task: Task, rollout_id: str, begin: Begin, limits: LoopLimits, stages: Stages) -> Played:
        """One rollout, to its end or a limit.

        Raises SetupFailure, EpisodeLost, EnvironmentFault, CaptureError of the model side, and what `stages` does;
        NoPlace before `begin` is called: once there is a place for it, `play` is called again. When
        it is cancelled, everything that it opened is closed first.
        """
        ...
