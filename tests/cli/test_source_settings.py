"""`sources`: several places that rollouts come from, in YAML; what is wrong is one line that names the source."""

import pytest
import yaml

from harness_trainer.cli import main
from harness_trainer.config import CollectConfig, RunConfig, may_change, own_rollouts
from harness_trainer.environments import EnvironmentClassConfig, OpenEnvConfig, OrsConfig
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.rollouts.config import RolloutConfig, SourceSpec
from harness_trainer.rundir import _differences
from harness_trainer.tasks import Task
from harness_trainer.workload import Inspected, Inspector

ECHO = {"name": "echo", "env": "openenv:http://127.0.0.1:8000", "tasks": "rows.jsonl", "weight": 2}
CODE = {"name": "code", "tasks": "./tasks", "harness": "opencode:3,pi", "max_turns": 30, "pass_reward": 0.5}
SHOP = {"name": "shop", "tasks": "ors:http://127.0.0.1:9000", "env": {"num_tasks": 4}, "reward_weights": {"a": 0.5}}


def given(tmp_path, **settings):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["--config", str(file)]


def shown(capsys, *args, command="train"):
    assert main([command, "--dry-run", *args]) == 0, capsys.readouterr().err
    return yaml.safe_load(capsys.readouterr().out)


def test_sources_in_a_file_are_read_and_can_be_given_again(capsys, tmp_path):
    once = shown(capsys, *given(tmp_path, sources=[ECHO, CODE, SHOP]))
    config = RunConfig.model_validate(once)
    echo, code, shop = config.each_source
    assert isinstance(echo.env, OpenEnvConfig) and (echo.weight, code.weight) == (2, 1)
    assert (code.env.type, code.harness, code.tasks) == ("own", "opencode:3,pi", "./tasks")
    assert shop.env == OrsConfig(target="http://127.0.0.1:9000", num_tasks=4)
    assert shown(capsys, *given(tmp_path, **once)) == once
    assert shown(capsys, *given(tmp_path, sources=[ECHO]), command="rollout")["sources"][0]["name"] == "echo"
    assert CollectConfig(sources=[ECHO, CODE]).as_run().sources == RunConfig(sources=[ECHO, CODE]).sources


@pytest.mark.parametrize("flag", ["--config", "--sources"])
def test_sources_of_a_training_run_are_evaluated_on_their_tasks_and_a_note_says_so(capsys, tmp_path, flag):
    file = given(tmp_path, sources=[ECHO, {**CODE, "evaluation": "./held-out"}])[1]
    assert main(["train", "--dry-run", flag, file]) == 0
    capsys.readouterr()
    assert main(["rollout", "--dry-run", flag, file]) == 0
    out, err = capsys.readouterr()
    assert err == "harness-trainer: note: nothing is trained here: sources.code.evaluation is passed over\n"
    assert [source["evaluation"] for source in yaml.safe_load(out)["sources"]] == [None, None]


def test_the_flag_names_a_file_or_is_json(capsys, tmp_path):
    file = tmp_path / "sources.yaml"
    for content in ([ECHO, CODE], {"sources": [ECHO, CODE]}):
        file.write_text(yaml.safe_dump(content))
        assert [one["name"] for one in shown(capsys, "--sources", str(file))["sources"]] == ["echo", "code"]
    assert shown(capsys, "--sources", '[{"name": "x", "tasks": "examples"}]')["sources"][0]["name"] == "x"


def test_settings_of_a_source_are_in_force_for_it_alone():
    config = RunConfig(sources=[ECHO, CODE, SHOP], rollouts={"max_turns": 5, "pass_reward": 0.9, "seed": 7})
    echo, code, shop = (own_rollouts(config.rollouts, source) for source in config.each_source)
    assert [one.max_turns for one in (echo, code, shop)] == [5, 30, 5]
    assert [one.pass_reward for one in (echo, code, shop)] == [0.9, 0.5, 0.9]
    assert shop.reward_weights == {"a": 0.5} and not echo.reward_weights
    assert {one.seed for one in (echo, code, shop)} == {7}


@pytest.mark.parametrize("verifiers", [{"reward": "mine.py:f"}, {"reward_weights": {"tests": 1.0}}])
def test_what_the_run_says_of_the_verifiers_rewards_is_not_for_environments(verifiers):
    """Weighed by names that it does not have, each of their rollouts would be unscored."""
    config = RunConfig(sources=[ECHO, CODE, SHOP], rollouts=verifiers)
    echo, code, shop = (own_rollouts(config.rollouts, source) for source in config.each_source)
    assert {name: getattr(code, name) for name in verifiers} == verifiers
    assert (echo.reward, echo.reward_weights, shop.reward, shop.reward_weights) == (
        "verifier",
        {},
        "verifier",
        {"a": 0.5},
    )


def test_without_sources_there_is_one_in_the_same_form_and_it_has_no_name():
    (agents,) = RunConfig(tasks="t", harness="pi", rollouts={"evaluation": {"tasks": "e"}}).each_source
    assert (agents.name, agents.tasks, agents.harness, agents.evaluation) == ("", "t", "pi", "e")
    (race,) = RunConfig(tasks="rows.jsonl", env="class:race.py:Race").each_source
    assert race.env == EnvironmentClassConfig(target="race.py:Race") and race.harness is None
    assert RunConfig().sources is None and not RunConfig().evaluates
    assert RunConfig(sources=[{**CODE, "evaluation": "held-out"}]).evaluates


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sources": []}, "at least one source"),
        ({"sources": "code"}, "code cannot be read"),
        ({"sources": [CODE, {**ECHO, "name": "code"}]}, "two sources are named code"),
        ({"sources": [{**CODE, "weight": 0}]}, "source code: weight: Input should be greater than 0"),
        ({"sources": [{**CODE, "weight": -1}]}, "source code: weight"),
        ({"sources": [{**CODE, "weight": float("inf")}]}, "source code: weight: Input should be a finite number"),
        ({"sources": [{**CODE, "wieght": 2}]}, "source code: wieght: Extra inputs are not permitted"),
        ({"sources": [CODE, {"tasks": "t"}]}, "source 2: name: Field required"),
        ({"sources": [{**CODE, "name": "a/b"}]}, "source a/b: name"),
        ({"sources": [{"name": "a"}]}, "source a: it has neither tasks nor env"),
        ({"sources": [{**ECHO, "harness": "pi"}]}, "source echo: env openenv takes no harness of ours"),
        ({"sources": [{**ECHO, "tasks": None}]}, "source echo: it has no rows"),
        ({"sources": [{**ECHO, "env": "openenv:nonsense"}]}, "source echo: env.openenv.target"),
        ({"sources": [{**ECHO, "env": {"type": ECHO["env"], "name": "x"}}]}, "leave env.name out"),
        ({"sources": [{**ECHO, "reward": "mine.py:f"}]}, "give env.rewards, and leave reward out"),
        ({"sources": [{**SHOP, "tasks": "rows.jsonl", "env": {"type": "ors:a/b"}}]}, "is named by tasks: ors:"),
        (
            {"sources": [{**CODE, "reward": "f.py:f", "reward_weights": {"a": 1.0}}]},
            "source code: reward_weights weigh",
        ),
        ({"sources": [CODE], "tasks": "mine"}, "sources say what runs, and tasks does too"),
        ({"sources": [CODE], "harness": "pi"}, "sources say what runs, and harness does too"),
        ({"sources": [CODE], "env": ECHO["env"]}, "env does too"),
        ({"sources": [CODE], "rollouts": {"evaluation": {"tasks": "x"}}}, "give it `evaluation`"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_source(capsys, tmp_path, settings, says):
    assert main(["train", "--dry-run", *given(tmp_path, **settings)]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_source_that_cannot_be_used_is_named_before_anything_is_started(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "loop.py").write_text("class Loop:\n    def run(self, task, model):\n        return 1.0\n")
    loop = {"name": "mine", "env": f"loop:{tmp_path}/loop.py:Loop", "tasks": str(tmp_path / "empty.jsonl")}
    for source, says in (
        (loop, "source mine: --tasks .*empty.jsonl has no rows: write one JSON object per line"),
        ({**loop, "env": f"loop:{tmp_path}/loop.py:Gone"}, "source mine: .*Gone"),
        ({"name": "code", "tasks": str(tmp_path / "nowhere")}, "source code: no tasks at"),
        ({"name": "code", "tasks": "cheer", "harness": "nobody"}, "source code: .*nobody"),
        ({"name": "hub", "env": "openenv-harbor:http://127.0.0.1:9"}, "source hub: no server answers"),
    ):
        inspector = Inspector(RunConfig(sources=[source]), "test", tmp_path / "owned", lambda line: None)
        with pytest.raises(HarnessTrainerError, match=says):
            inspector.inspect()


def test_a_group_that_is_scored_together_may_be_silent_for_all_of_its_rollouts(tmp_path):
    """On a server with one place they play one by one, and the learner hears of none before the last."""
    task, config = Task("row", tmp_path, "Play."), RolloutConfig(group_size=6)
    alone, together = (
        Inspected(SourceSpec(config=config, env=env, tasks="-", harness="Env"), [task], [], ["Env"]).longest_s
        for env in (EnvironmentClassConfig(target="a.py:Env", reward_scope=scope) for scope in ("rollout", "group"))
    )
    assert together == 6 * alone > 0


def test_a_continued_run_may_find_a_server_elsewhere_and_nothing_else_changed():
    old, new = RunConfig(sources=[ECHO, CODE]), RunConfig(sources=[{**ECHO, "weight": 3}, CODE])
    found = _differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    assert found == ["sources.echo.weight: 2.0 there, 3.0 now"]
    allowed = may_change(RunConfig(sources=[ECHO, CODE, SHOP]))
    assert {"sources.echo.env.target", "sources.shop.tasks", "sources.shop.env.silence_s"} <= allowed
    assert not {"sources.echo.weight", "sources.echo.tasks", "sources.code.tasks", "env.target"} & allowed
    assert "env.target" in may_change(RunConfig(env=ECHO["env"], tasks="rows.jsonl"))
    assert "env.target" not in may_change(RunConfig(env="class:race.py:Race", tasks="rows.jsonl"))
    assert _differences({"a": 1}, RunConfig().model_dump(include={"sources"}) | {"a": 1}) == [], "as before there were"
