"""The examples for ORS really run: as servers, played by our own loop, and by the command that they print."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from harness_trainer.loops.loading import load_target
from tests.loops.ors_playing import called, episode, ors, played
from tests.loops.ors_server import running
from tests.loops.playing import calls, says

EXAMPLES = Path(__file__).parents[2] / "examples" / "white_box"
NAMES = ("ors_echo", "ors_task_tools")


@pytest.fixture(scope="module")
def echo():
    with running(script=EXAMPLES / "ors_echo.py", args=("--serve", "--port", "{port}")) as server:
        yield server


@pytest.fixture(scope="module")
def warehouse():
    with running(script=EXAMPLES / "ors_task_tools.py", args=("--serve", "--port", "{port}")) as server:
        yield server


async def test_the_echo_server_rewards_the_word_of_the_task(echo):
    async with ors(echo.url) as environment:
        tasks = await environment.tasks()
        assert [task.metadata["row"]["target"] for task in tasks][:2] == ["hello", "world"] and len(tasks) == 8
    for text, reward in (("hello", 1.0), ("goodbye", 0.0)):
        ended, scores = await played(ors(echo.url), calls(("echo", {"text": text})), says("Done."))
        assert scores.total == reward and ended.how == ("done" if reward else "stop")


async def test_each_task_of_the_warehouse_has_its_own_tools(warehouse):
    answers = [{"amount": 8}, {"place": "left"}, {"amount": 16}]
    async with ors(warehouse.url) as environment:
        for number, answer in enumerate(answers):
            async with episode(environment, number) as one:
                await one.start()
                tools = {tool.name: tool for tool in one.tools}
                assert set(tools) == ({"look", "submit", "count"} if number == 2 else {"look", "submit"})
                assert list(tools["submit"].parameters["properties"]) == list(answer)
                assert "middle: 8" in (await called(one, "look")).content
                wrong = await called(one, "submit", nonsense=1)
                assert wrong.failed and not wrong.done
                assert (await called(one, "submit", **answer)).done and one.state.reward == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_an_example_serves_and_trains_in_one_command(name, monkeypatch):
    """All but the training itself, which `harness-trainer train` does with the address of the server that runs."""
    import httpx

    load_target(f"{EXAMPLES / name}.py:main")
    module = next(each for key, each in sys.modules.items() if re.fullmatch(rf"{name}_[0-9a-f]{{8}}", key))
    ran = []

    class Done:
        returncode = 7

    def run(command, **_):
        url = command[5].removeprefix("ors:")
        ran.append((command, httpx.get(f"{url}/list_environments", trust_env=False).json()))
        return Done

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["example", "--model", "smollm2", "--run-dir", "runs/x"])
    assert module.main() == 7
    ((command, environments),) = ran
    assert command[:5] == [*module.TRAIN, "--tasks"] and command[6:] == sys.argv[1:]
    assert len(environments) == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_needs(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    found = re.match(r"# /// script\n(.*?)# ///\n", text, re.DOTALL)
    assert found is not None
    said = tomllib.loads("".join(line.removeprefix("# ") for line in found[1].splitlines(keepends=True)))
    assert "harness-trainer[ors]" in said["dependencies"] and said["requires-python"] == ">=3.11"
