"""The examples for OpenEnv really run: each class on its own local server, with its reward functions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness_trainer.environments.class_config import EnvironmentClassConfig
from harness_trainer.loops.base import Transcript
from harness_trainer.loops.environment_class import ClassEnvironment
from harness_trainer.loops.loading import load_target
from tests.loops.openenv_serving import called
from tests.loops.openenv_serving import environment as openenv

URLS = ("ECHO_URL", "WORDLE_URL", "CATCH_URL", "SUDOKU_URL")
EXAMPLES = Path(__file__).parents[2] / "examples" / "white_box"


def module(name):
    """As the class is loaded: its reward functions and its server are of the same module."""
    load_target(f"{EXAMPLES / name}.py:main")
    return next(each for key, each in sys.modules.items() if re.fullmatch(rf"{name}_[0-9a-f]{{8}}", key))


@contextlib.contextmanager
def at(**urls):
    before = {name: os.environ.get(name) for name in urls}
    os.environ.update(urls)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def echo():
    with module("echo").local_server() as url, at(ECHO_URL=url):
        yield url


@pytest.fixture(scope="module")
def wordle():
    pytest.importorskip("textarena", reason="pip install 'harness-trainer[examples]'")
    with module("wordle").local_server() as url, at(WORDLE_URL=url):
        yield url


@pytest.fixture(scope="module")
def catch():
    pytest.importorskip("pyspiel", reason="pip install 'harness-trainer[examples]'")
    with module("catch").local_server() as url, at(CATCH_URL=url):
        yield url


@pytest.fixture(scope="module")
def sudoku():
    pytest.importorskip("textarena", reason="pip install 'harness-trainer[examples]'")
    with module("sudoku").local_server() as url, at(SUDOKU_URL=url):
        yield url


@contextlib.asynccontextmanager
async def playing(tmp_path, name, kind, *rewards, row=0, **columns):
    """An episode of the row of this number."""
    file = EXAMPLES / f"{name}.py"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**each, **columns}) + "\n" for each in module(name).rows(4)))
    config = EnvironmentClassConfig(
        target=f"{file}:{kind}", rewards=[f"{file}:{reward}" for reward in rewards], stop_when_done=True
    )
    async with ClassEnvironment(config, rows) as environment:
        tasks = await environment.tasks()
        async with environment.episode(tasks[row], "r") as one:
            yield one, await one.start()


async def earned(episode):
    return dict((await episode.rewards(Transcript([]))).by_name)


async def test_echo(tmp_path, echo):
    async with playing(tmp_path, "echo", "EchoEnv", "reward_length") as (one, opening):
        assert opening == module("echo").rows(1)[0]["prompt"]
        assert (await called(one, "echo", message="Hello World!")).content == "Hello World!"
        assert await earned(one) == {"reward_length": pytest.approx(1.2)}


async def test_echo_without_a_class(tmp_path, echo):
    async with openenv(tmp_path, echo, observation="echoed_message") as environment:
        (task,) = await environment.tasks()
        async with environment.episode(task, "r") as one:
            await one.start()
            assert (await called(one, "echo", message="Hi")).content == "Hi"
            assert (await one.rewards(Transcript([]))).total == pytest.approx(0.2)


WORDLE = ("wordle", "WordleEnv", "reward_win", "reward_partial", "reward_invalid")


async def test_wordle_that_is_won(tmp_path, wordle):
    example = module("wordle")
    _, secrets = example.wordle_of_this_machine()
    secret = example.random.Random(0).choice(secrets)
    other = next(word for word in secrets if word[0] == secret[0] and word != secret)
    async with playing(tmp_path, *WORDLE) as (one, opening):
        assert opening[-1]["content"].startswith(example.PROMPT)
        assert "Enter your guess to begin." in opening[-1]["content"]
        first = await called(one, "guess", guess=f"[{other}]")
        assert "You have 5 guesses left." in first.content and not first.done
        assert opening[-1]["content"] not in first.content, "only what is new"
        assert "invalid move" in (await called(one, "guess", guess=secret)).content
        assert (await called(one, "guess", guess=f"[{secret}]")).done
        assert await earned(one) == {
            "reward_win": pytest.approx(1 + 0.5 * 4 / 6),
            "reward_partial": 0,
            "reward_invalid": -0.1,
        }
        with pytest.raises(ValueError, match=r"Game over\."):
            await called(one, "guess", guess="[apple]")


async def test_wordle_that_is_lost(tmp_path, wordle):
    example = module("wordle")
    _, secrets = example.wordle_of_this_machine()
    secret = example.random.Random(1).choice(secrets)
    words = sorted((word for word in secrets if word != secret), key=lambda word: -greens(word, secret))[:6]
    async with playing(tmp_path, *WORDLE, row=1) as (one, _):
        replies = [await called(one, "guess", guess=f"[{word}]") for word in words]
        assert [reply.done for reply in replies] == [False] * 5 + [True]
        best = 0.1 * greens(words[0], secret)
        assert await earned(one) == {"reward_win": 0.0, "reward_partial": pytest.approx(best), "reward_invalid": 0.0}


def greens(word, secret):
    return sum(a == b for a, b in zip(word, secret, strict=True))


async def test_catch(tmp_path, catch):
    for row, follow in ((0, True), (1, False), (2, True)):
        async with playing(tmp_path, "catch", "CatchEnv", "reward_caught", row=row) as (one, opening):
            board = opening[-1]["content"].splitlines()[-10:]
            ball = board[0].index("o")
            reply, paddle = None, 2
            while reply is None or not reply.done:
                # To the ball, or to the side that it is not on.
                goal = ball if follow else (0 if ball >= 2 else 4)
                if paddle == goal:
                    reply = await called(one, "stay")
                else:
                    reply = await called(one, "move", direction="left" if goal < paddle else "right")
                    paddle += 1 if goal > paddle else -1
                if not reply.done:
                    assert reply.content.splitlines()[-1].index("x") == paddle
            assert reply.content == ("Caught!" if follow else "Missed.")
            assert await earned(one) == {"reward_caught": float(follow)}
            with pytest.raises(ValueError, match="landed"):
                await called(one, "stay")


async def test_catch_says_what_is_no_direction(tmp_path, catch):
    async with playing(tmp_path, "catch", "CatchEnv", "reward_caught") as (one, _):
        with pytest.raises(ValueError, match="'left' or 'right'"):
            await called(one, "move", direction="up")
        assert await earned(one) == {"reward_caught": 0.0}


SUDOKU = ("sudoku", "SudokuEnv", "reward_solved", "reward_filled", "reward_invalid")


async def test_sudoku_with_partial_credit(tmp_path, sudoku):
    game = module("sudoku").make_sudoku(2)
    empty = [(r, c) for r in range(9) for c in range(9) if game.game_board[r][c] == 0]
    assert empty, "there is something to fill"
    async with playing(tmp_path, *SUDOKU, row=2) as (one, opening):
        assert opening[-1]["content"].count(" . ") == len(empty) - sum(c == 8 for _, c in empty)
        filled = next((r, c) for r in range(9) for c in range(9) if game.game_board[r][c])
        wrong = await called(one, "place", row=filled[0] + 1, column=filled[1] + 1, number=1)
        assert "invalid move" in wrong.content.lower()
        for number, (r, c) in enumerate(empty, 1):
            reply = await called(one, "place", row=r + 1, column=c + 1, number=game.full_grid[r][c])
            found = await earned(one)
            assert found["reward_invalid"] == -0.05
            if number < len(empty):
                assert not reply.done
                assert (found["reward_solved"], found["reward_filled"]) == (0.0, pytest.approx(number / len(empty)))
        assert reply.done and (found["reward_solved"], found["reward_filled"]) == (1.0, 0.0)


async def test_multi_env_routes_by_its_column(tmp_path, wordle, catch):
    rewards = ("wordle_reward", "catch_reward")
    async with playing(tmp_path, "multi_env", "MultiEnv", *rewards, row=0) as (one, opening):
        assert "Wordle" in opening[-1]["content"]
        assert [tool.name for tool in one.tools] == ["guess", "move", "stay"]
        assert "Feedback" in (await called(one, "guess", guess="[stone]")).content
        with pytest.raises(ValueError, match="a game of wordle"):
            await called(one, "stay")
        found = await earned(one)
        assert found["catch_reward"] is None and found["wordle_reward"] >= 0.0
    async with playing(tmp_path, "multi_env", "MultiEnv", *rewards, row=1) as (one, opening):
        assert "paddle" in opening[-1]["content"]
        while not (await called(one, "stay")).done:
            pass
        found = await earned(one)
        assert found["wordle_reward"] is None and found["catch_reward"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("echo", [r"https://openenv-echo-env\.hf\.space"]),
        ("wordle", [r"https://openenv-wordle\.hf\.space"]),
        ("catch", [r"https://openenv-openspiel-env\.hf\.space"]),
        ("sudoku", [r"https://openenv-sudoku\.hf\.space"]),
        ("multi_env", []),
        ("echo --local", [r"http://127\.0\.0\.1:\d+"]),
        ("echo --local --two-cores", [r"http://127\.0\.0\.1:\d+"]),
        ("multi_env --local", [r"http://127\.0\.0\.1:\d+"] * 2),
    ],
)
def test_as_a_script_it_writes_its_rows_and_trains(tmp_path, name, where):
    """The trainer is a stand-in that says what it was told."""
    pytest.importorskip("textarena", reason="pip install 'harness-trainer[examples]'")
    name, *local = name.split()
    environment = {key: value for key, value in os.environ.items() if key not in URLS}
    trainer = tmp_path / "trainer" / "harness_trainer" / "cli.py"
    trainer.parent.mkdir(parents=True)
    (trainer.parent / "__init__.py").touch()
    trainer.write_text(
        "import os, sys\nprint(*sys.argv[1:], sep='\\n')\n"
        f"names = {URLS!r}\n"
        "print('urls', *(os.environ[name] for name in names if name in os.environ))\n"
    )
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *local, "--rows", "rows.jsonl", "--model", "smollm2"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path / "trainer")},
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.splitlines()
    urls = told.pop().split()[1:]
    assert len(urls) == len(where) and all(re.fullmatch(*each) for each in zip(where, urls, strict=True))
    assert told[0] == "train" and told[told.index("--model") + 1] == "smollm2"
    target = told[told.index("--env") + 1].removeprefix("class:")
    assert target.startswith(str(EXAMPLES / f"{name}.py")) and load_target(target)
    assert all(load_target(reward) for reward in told[told.index("--env.rewards") + 1].split(","))
    assert all("prompt" in json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())


@pytest.mark.parametrize("name", ["echo", "wordle", "catch", "sudoku", "multi_env"])
def test_each_is_one_file_that_says_what_it_needs(name):
    tomllib = pytest.importorskip("tomllib")
    text = (EXAMPLES / f"{name}.py").read_text()
    header = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", text)
    assert header is not None
    wanted = tomllib.loads("".join(line[2:] for line in header[1].splitlines(keepends=True)))
    assert "openenv==0.10.0" in wanted["dependencies"]
