"""Several agents in one run: shares of the groups, tasks with an agent of their own, and no group with two."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from harness_trainer.errors import ConfigError, TaskError
from harness_trainer.learner.feeder import StepBatch
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.curriculum import task_of_group
from harness_trainer.rollouts.mix import load_mix, pin_harness
from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.runner import Runner
from harness_trainer.rollouts.sources import OpenSource, Sources
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from tests.rollouts.rolling import task


def mix(spec, *tasks, seed=0):
    return load_mix(spec, tasks, RolloutConfig(seed=seed))


@pytest.fixture
def moon(tmp_path):
    return task(tmp_path)


def test_every_pass_over_the_shares_holds_exactly_the_shares_and_an_id_always_means_the_same_agent(moon):
    mixed = mix("pyagent:3, pyagent-chat", moon, seed=4)
    names = [mixed.of_group(n, moon) for n in range(400)]
    assert all(Counter(names[n : n + 4]) == {"pyagent": 3, "pyagent-chat": 1} for n in range(0, 400, 4))
    assert names == [mix("pyagent:3,pyagent-chat:1", moon, seed=4).of_group(n, moon) for n in range(400)]
    assert len({tuple(names[n : n + 4]) for n in range(0, 400, 4)}) > 1, "passes have orders of their own"


def test_each_task_meets_each_agent_although_both_go_in_passes(moon):
    tasks = [moon, replace(moon, name="sun")]
    mixed = mix("pyagent,pyagent-chat", *tasks)
    met = Counter((task_of_group(n, tasks, 0).name, mixed.of_group(n, moon)) for n in range(80))
    assert len(met) == 4 and min(met.values()) >= 8, met


def test_a_task_that_names_its_agent_gets_it_whatever_the_shares(moon):
    own = replace(moon, name="own", metadata={"harness": "opencode"})
    mixed = mix("pyagent", moon, own)
    assert set(mixed.harnesses) == {"pyagent", "opencode"}, "so that it is installed before anything starts"
    assert {mixed.of_group(n, own) for n in range(9)} == {"opencode"}
    assert {mixed.of_group(n, moon) for n in range(9)} == {"pyagent"}


def test_an_evaluation_runs_a_task_with_one_agent_by_the_shares_or_with_every_agent(moon):
    own, sun = replace(moon, name="own", metadata={"harness": "opencode"}), replace(moon, name="sun")
    mixed = mix("pyagent:3,pyagent-chat", moon, own, sun)
    by_shares = mixed.evaluated([moon, own, sun], every_agent=False, num=None)
    assert by_shares == [(t.name, mixed.of_group(n, t)) for n, t in enumerate([moon, own, sun])]
    every = mixed.evaluated([moon, own, sun], every_agent=True, num=None)
    assert every == [
        ("moon", "pyagent"), ("moon", "pyagent-chat"), ("own", "opencode"), ("sun", "pyagent"), ("sun", "pyagent-chat"),
    ]  # fmt: skip
    assert mixed.evaluated([moon, own, sun], every_agent=True, num=2) == every[:2]
    assert mixed.evaluated([moon, own, sun], every_agent=True, num=7) == [*every, *every[:2]]
    assert mixed.evaluated([], every_agent=False, num=None) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("pyagent:0", "at least 1"),
        ("pyagent,", "write opencode:3,pi:1"),
        ("pyagent,pyagent:2", "twice"),
        ("pyagent,nosuch", "unknown harness 'nosuch'"),
    ],
)
def test_shares_that_make_no_sense_are_refused_in_one_line(moon, spec, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        mix(spec, moon)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["nosuch", 7])
def test_a_tasks_own_agent_that_is_none_is_refused_with_the_tasks_name(moon, named):
    with pytest.raises(TaskError, match="task 'own'"):
        mix("pyagent", replace(moon, name="own", metadata={"harness": named}))


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """A task folder with agents of its own, and another folder to work in."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "oc.yaml").write_text("extends: pyagent\nenv: {MY: '1'}\n")
    (folder / "a.py").write_text("print('its own')\n")
    (tmp_path / "a.py").write_text("print('of the folder that somebody works in')\n")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("others", ["pyagent", "cmd:python3 a.py"])
def test_two_agents_that_differ_are_never_taken_for_one(moon, own_files, others):
    named = "./oc.yaml" if others == "pyagent" else "cmd:python3 a.py"
    with pytest.raises(TaskError, match="task 'own'.* the two differ: give one a `name`"):
        mix(others, moon, replace(moon, name="own", path=own_files, metadata={"harness": named}))
    same = replace(moon, name="own", path=own_files.parent, metadata={"harness": others})
    assert len(mix(others, moon, same).harnesses) == 1


def test_commands_of_two_tasks_are_two_agents(moon, own_files):
    (own_files / "b.py").write_text("")
    tasks = [replace(moon, name=n, path=own_files, metadata={"harness": f"cmd:python3 {n}.py"}) for n in "ab"]
    mixed = mix("pyagent", *tasks)
    assert [mixed.harnesses[mixed.of_group(0, task)].argv[-1] for task in tasks] == [
        "${home}/agent/a.py",
        "${home}/agent/b.py",
    ]


def test_shares_of_two_agents_with_one_name_are_refused(moon, own_files):
    with pytest.raises(ConfigError, match="'pyagent' twice: they differ: give one a `name`"):
        mix("pyagent,own/oc.yaml", moon)


def test_a_tasks_own_files_lie_in_its_folder_wherever_the_process_works(moon, own_files, monkeypatch):
    (own_files / "oc.yaml").write_text("extends: pyagent\nname: mine\n")
    named = replace(moon, name="named", path=own_files, metadata={"harness": "./oc.yaml"})
    command = replace(moon, name="command", path=own_files / "tasks.jsonl", metadata={"harness": "cmd:python3 a.py"})
    here = mix("pyagent", named, command)
    monkeypatch.chdir("/")
    assert mix("pyagent", named, command) == here
    assert here.harnesses["cmd:a.py"].files == {"/home/agent/a.py": "print('its own')\n"}
    with pytest.raises(TaskError, match="task 'lost'.*there is no .*/nosuch.yaml"):
        mix("pyagent", replace(named, name="lost", metadata={"harness": "./nosuch.yaml"}))


def test_a_command_with_commas_and_numbers_is_one_agent(moon):
    assert len(mix("cmd:python3 a.py --words a,b:2", moon).harnesses) == 1


def test_files_are_pinned_because_the_runner_works_in_another_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("extends: pyagent\nname: mine\n")
    monkeypatch.chdir(tmp_path)
    assert pin_harness("./mine.yaml:2,pyagent") == f"{tmp_path}/mine.yaml:2,pyagent:1"
    assert pin_harness("opencode") == "opencode"
    assert f"{tmp_path}/mine.yaml" in pin_harness("cmd:python mine.yaml"), "the runner works in another folder"


async def run_groups(store, tasks, harness_of, num_groups, seen):
    async def attempt(job):
        seen.append((job.group_id, job.harness))
        return RolloutResult(job.rollout_id, job.group_id, job.task.name, job.harness, 0, Outcome.OK, 1.0)

    config = RolloutConfig(group_size=2, max_concurrent=2)
    schedule = Schedule(max_open_groups=9, num_groups=num_groups)
    sources = Sources([OpenSource(config, tasks, attempt, harness_of)])
    runner = Runner(config, sources, store, schedule=schedule)
    running = asyncio.ensure_future(runner.run())
    async with asyncio.timeout(20):
        while store.group_counts().get("ready", 0) < num_groups and not running.done():
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_group_never_mixes_agents_and_a_continued_one_keeps_its_own(tmp_path, moon):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.set_state("policy_version", "1")
    store.open_group(0, moon.name, "pyagent-chat")  # left behind, of a run in which this was another agent's turn
    seen = []
    await run_groups(store, [moon], mix("pyagent:2,pyagent-chat", moon).of_group, 7, seen)
    results = [store.results(n) for n in range(7)]
    store.close()
    assert all(len({agent for group, agent in seen if group == n}) == 1 for n in range(7))
    assert {agent for group, agent in seen if group == 0} == {"pyagent-chat"}
    assert [r.harness for r in results[0]] == ["pyagent-chat"] * 2
    assert {agent for _, agent in seen} == {"pyagent", "pyagent-chat"}


def test_a_step_is_summed_up_agent_by_agent_and_an_unscored_rollout_is_no_zero():
    def group(number, agent, *rewards):
        results = [
            RolloutResult(f"r{number}-{n}", number, "moon", agent, 0, Outcome.OK, reward, num_turns=2)
            for n, reward in enumerate(rewards)
        ]
        return TrainGroup(number, "moon", results, [[] for _ in results])

    batch = StepBatch([group(0, "pi", 1.0, 0.0), group(1, "pi", 0.5, None), group(2, "opencode", None)], [], [], [])
    assert batch.by_harness() == {
        "opencode": {"num_groups": 1, "num_rollouts": 0, "num_turns": 2, "reward_mean": None, "reward_std": None},
        "pi": {"num_groups": 2, "num_rollouts": 3, "num_turns": 8, "reward_mean": 0.5}
        | {"reward_std": pytest.approx(0.408, abs=1e-3)},
    }
