"""How a person names a loop of his own in a run's settings, and what cannot stand beside it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness_trainer.config import RunConfig
from harness_trainer.environments import WHITE_BOX, OwnLoopConfig
from harness_trainer.rollouts.config import RolloutConfig


def test_the_short_form_is_type_and_target():
    config = RunConfig.model_validate({"env": "loop:my_loop.py:MyLoop", "tasks": "rows.jsonl"})
    assert config.env == OwnLoopConfig(target="my_loop.py:MyLoop")
    assert isinstance(config.env, WHITE_BOX)
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert (again.env, again.tasks) == (config.env, "rows.jsonl")


@pytest.mark.parametrize("other", [{"harness": "pi"}, {"sandbox": "docker"}])
def test_there_are_no_agents_and_sandboxes_beside_it(other):
    with pytest.raises(ValidationError, match=f"leave --{next(iter(other))} out"):
        RunConfig.model_validate({"env": "loop:my_loop.py:MyLoop", **other})


@pytest.mark.parametrize("env", ["loop", "loop:MyLoop", "loop:my_loop.py"])
def test_a_loop_needs_a_file_or_module_and_a_name(env):
    with pytest.raises(ValidationError, match="write file.py:Name"):
        RunConfig.model_validate({"env": env})


def test_limits_of_a_loop_are_those_of_its_settings_and_of_its_rollouts():
    config = RolloutConfig(max_tokens=64, start_timeout_s=7, loop={"max_completion_tokens": 500, "tool_timeout_s": 3})
    limits = config.loop.limits(max_tokens=config.max_tokens, start_timeout_s=config.start_timeout_s)
    assert (limits.max_completion_tokens, limits.max_tokens, limits.start_timeout_s) == (500, 64, 7)
    assert (limits.tool_timeout_s, limits.max_tool_calling_iterations, limits.images) == (3, None, False)
