"""Several sources in one run: who gets a group, whose fault a failure is, settings and evaluation of their own."""

from collections import Counter
from types import SimpleNamespace

import pytest

from harness_trainer.errors import ConfigError, TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec, SourceSpec
from harness_trainer.rollouts.sources import OpenSource, Sources, deal, named, naming, source_in
from harness_trainer.tasks import Task
from sandboxes.base import Access
from tests.rollouts.policy import Waits, finished, infra, no_sandbox, ready, run_sources


async def won(job):
    return finished(job)


def source(name, *tasks, weight=1.0, attempt=won, held_out=(), **settings):
    config = RolloutConfig(**{"group_size": 2, "max_concurrent": 2, **settings})
    tasks, held_out = ([SimpleNamespace(name=f"{name}/{task}") for task in of] for of in (tasks, held_out))
    return OpenSource(
        config, tasks, attempt, lambda number, task: f"agent-{number % 2}", name, weight, evaluation_tasks=held_out
    )


def draws(store, *sources):
    return Sources(sources).draws(store)


# -- dealing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1,), (2, 1), (1, 1, 1), (0.1, 0.2, 0.7), (1 / 3, 5, 0.01), (7, 7, 2, 3)])
def test_groups_are_dealt_by_weight_each_place_once_and_by_the_id_alone(weights):
    dealt = [deal(group, weights) for group in range(400)]
    for n, weight in enumerate(weights):
        places = [place for chosen, place in dealt if chosen == n]
        assert places == list(range(len(places))), "the groups of a source are numbered without a hole"
        for upto in range(1, 401):
            got = sum(chosen == n for chosen, _ in dealt[:upto])
            assert abs(got - upto * weight / sum(weights)) < len(weights), "at every moment, not only in the long run"
    assert deal(10**7, weights)[1] <= 10**7, "without counting up from 0"


def test_two_to_one_is_so_in_every_three_groups(store):
    drawn = [
        draws(store, source("a", "x", weight=2), source("b", "y")).draw(n)[0].name.partition("/")[0] for n in range(30)
    ]
    assert {tuple(sorted(drawn[n : n + 3])) for n in range(0, 30, 3)} == {("a", "a", "b")}


def test_each_source_goes_through_its_own_tasks_in_passes_and_a_restart_draws_the_same(store):
    def both():
        return draws(store, source("a", "x", "y", "z", weight=3), source("b", "x", "y"))

    drawn = [both().draw(n) for n in range(32)]
    one = both()
    assert drawn == [one.draw(n) for n in range(32)], "nothing is remembered from draw to draw"
    by_source = {name: [task.name for task, _ in drawn if task.name.startswith(name)] for name in "ab"}
    assert len(by_source["a"]) == 24 and len(by_source["b"]) == 8
    for name, size in (("a", 3), ("b", 2)):
        passes = [by_source[name][n : n + size] for n in range(0, len(by_source[name]), size)]
        assert all(len(set(each)) == size for each in passes)
    swapped = draws(store, source("b", "x", "y"), source("a", "x", "y", "z", weight=3))
    assert drawn == [swapped.draw(n) for n in range(32)], "nor has the order in the settings a say"
    agents = [agent for task, agent in drawn if task.name.startswith("b")]
    assert Counter(agents) == {"agent-0": 4, "agent-1": 4}, "shares of agents are of the source's own groups"


def test_pass_rates_count_in_their_own_source_only(store):
    easy = source("a", "x", "y", curriculum={"by": "pass_rate", "outside": 0.001}, pass_reward=0.5)
    hard = source("b", "x", "y", curriculum={"by": "pass_rate", "outside": 0.001})
    for group, task in enumerate(("a/x", "b/x")):
        store.open_group(group, task, "h")
        for slot in range(2):
            job = SimpleNamespace(
                rollout_id=f"{group}-{slot}", group_id=group, attempt=0, harness="h", task=SimpleNamespace(name=task)
            )
            store.start_rollout(job.rollout_id, group, slot, 0)
            store.finish_rollout(finished(job, reward=0.6 if slot else 1.0), final=True)
        store.group_ready(group)
    drawn = Counter(draws(store, easy, hard).draw(n)[0].name for n in range(2, 402))
    assert drawn["a/x"] < 20 < drawn["a/y"], "0.6 passes there"
    assert min(drawn["b/x"], drawn["b/y"]) > 50, "and half of them here"


# -- quarantine ------------------------------------------------------------------------------------------------------


def test_a_source_without_tasks_left_stalls_no_other_and_a_person_is_told(store):
    both = draws(store, source("a", "x"), source("b", "x", "y"))
    store.setup_failed("a/x", "no image", 1)
    assert {both.draw(n)[0].name for n in range(8)} == {"b/x", "b/y"}
    lines = [note.detail["line"] for note in store.notes(0) if note.kind == "source_out"]
    assert len(lines) == 1 and lines[0].startswith("source a gets no groups")
    for task in ("b/x", "b/y"):
        store.setup_failed(task, "gone", 1)
    with pytest.raises(TrainingFailed, match="all 3 tasks are quarantined"):
        both.draw(9)
    store.release_all()
    assert {both.draw(n)[0].name for n in range(8)} == {"a/x", "b/x", "b/y"}


async def test_the_same_name_in_two_sources_is_two_tasks(store):
    async def broken(job):
        return no_sandbox(job)

    config = RolloutConfig(group_size=2, max_concurrent=2, quarantine_after=1)
    sources = [source("a", "x", attempt=broken), source("b", "x")]
    await run_sources(store, sources, ready(store, 3), config=config, schedule={"max_open_groups": 3})
    assert list(store.quarantined()) == ["a/x"]
    assert {result.task for group in range(5) for result in store.results(group) if result.reward} == {"b/x"}


# -- whose fault -----------------------------------------------------------------------------------------------------


async def test_the_breaker_judges_each_source_by_itself_and_names_it(store):
    async def dead(job):
        return infra(job, "connection refused")

    config = RolloutConfig(group_size=2, max_concurrent=2, infra_window=6, max_refills=0, infra_retries=0)
    sources = [source("shop", "x", attempt=dead), source("code", "x", weight=9.0)]
    with pytest.raises(TrainingFailed) as caught:
        await run_sources(store, sources, lambda: False, config=config, schedule={"max_open_groups": 90})
    assert str(caught.value).startswith("6 of the last 6 rollouts of source shop failed for infra reasons")
    outcomes = Counter((result.source, str(result.outcome)) for result in store.rollouts())
    assert outcomes["shop", "infra_failed"] == 6 and outcomes["code", "ok"] > 20
    assert not outcomes["code", "infra_failed"]


async def test_a_source_whose_groups_are_all_dropped_does_not_hide_behind_another(store):
    async def unscored(job):
        return finished(job, reward=None)

    sources = [source("a", "x", attempt=unscored), source("b", "x")]
    schedule = {"max_open_groups": 90, "max_dropped_in_a_row": 3}
    with pytest.raises(TrainingFailed, match="3 groups of source a in a row were dropped"):
        await run_sources(store, sources, lambda: False, config=RolloutConfig(group_size=2), schedule=schedule)


# -- settings and evaluation -----------------------------------------------------------------------------------------


async def test_rewards_are_weighed_by_the_sources_own_weights(store):
    async def attempt(job):
        return finished(job, reward=1.0, rewards={"tests": 0.5, "style": 0.25})

    sources = [source("a", "x", attempt=attempt, reward_weights={"tests": 1.0}), source("b", "x", attempt=attempt)]
    await run_sources(store, sources, ready(store, 2), config=RolloutConfig(group_size=2))
    rewards = {result.source: result.reward for result in store.rollouts()}
    assert rewards == {"a": 0.5, "b": 1.0}


async def test_an_evaluation_tells_of_all_and_of_each_source(store):
    async def attempt(job):
        return finished(job, reward=0.6)

    sources = [
        source("a", "x", attempt=attempt, held_out=("p", "q"), pass_reward=0.5),
        source("b", "x", attempt=attempt, held_out=("p",)),
        source("c", "x", attempt=attempt),
    ]
    config = RolloutConfig(group_size=2, evaluation={"every": 2, "samples": 2})
    await run_sources(store, sources, lambda: bool(store.evaluations()), config=config, sleep=Waits())
    (report,) = store.evaluations()
    assert (report["num_tasks"], report["num_scored"], report["pass_at_1"]) == (3, 6, pytest.approx(2 / 3))
    assert {name: (one["num_tasks"], one["pass_at_1"]) for name, one in report["sources"].items()} == {
        "a": (2, 1.0),
        "b": (1, 0.0),
    }
    (line,) = [note.detail["line"] for note in store.notes(0) if note.kind == "evaluation"]
    assert "; a: pass@1 1.000" in line and "; b: pass@1 0.000" in line


# -- names and specs -------------------------------------------------------------------------------------------------


def test_names_of_tasks_begin_with_their_source_where_there_are_several(tmp_path):
    task = Task("org/moon", tmp_path, "Say moon.", verify_script="true")
    (one,) = named("code", [task])
    assert (one.name, one.box.name) == ("code/org/moon", "org/moon"), "the sandbox is the same, and shared"
    assert named("", [task]) == [task]
    assert source_in("code/org/moon", ["code", "shop"]) == "code"
    assert source_in("org/moon", []) == "" == source_in("code", ["code"])


def test_a_fault_says_in_which_source_it_is():
    with pytest.raises(ConfigError, match="^source shop: no such thing$"), naming("shop"):
        raise ConfigError("no such thing")
    with pytest.raises(ConfigError, match="^no such thing$"), naming(""):
        raise ConfigError("no such thing")


def test_a_run_of_one_source_is_told_in_the_same_form(tmp_path):
    spec = RunnerSpec(
        config=RolloutConfig(max_turns=3),
        tasks="t",
        harness="pi",
        harness_bin=tmp_path / "bin",
        store=tmp_path,
        artifacts=tmp_path,
        registry=tmp_path,
        run_id="r",
        model="m",
        context=1,
        access=Access(),
        admin_url="-",
        max_open_groups=1,
        num_groups=1,
    )
    (only,) = spec.each_source()
    assert (only.name, only.tasks, only.harness, only.config) == ("", "t", "pi", spec.config)
    assert spec.of_source(only) == spec
    other = SourceSpec(
        name="b", config=RolloutConfig(max_turns=9), tasks="u", harness="x:2,y", harness_bins={"y": tmp_path / "y"}
    )
    seen = spec.of_source(other, "y")
    assert (seen.config.max_turns, seen.tasks, seen.harness_bin) == (9, "u", tmp_path / "y")
