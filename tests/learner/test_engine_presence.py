"""An engine that dies and is started again while the learner sends weights, or waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stub_engine import StubEngine, serving

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls, EngineGone
from harness_trainer.learner.engine_presence import EnginePresence, OneEngine
from harness_trainer.rollouts.store import RolloutStore

DEAD = "http://127.0.0.1:1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    store = RolloutStore(tmp_path / "store.sqlite")
    store.forget_engine()
    yield store
    store.close()


@pytest.fixture
def url_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine_url"
    path.write_text(DEAD)
    return path


@pytest.fixture
def presence(store: RolloutStore, url_file: Path) -> EnginePresence:
    presence = EnginePresence(store, url_file, away_s=5, noticed_s=1)
    presence.reach()
    return presence


def later(work: Callable[[], object], after_s: float = 0.3) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(after_s), work()), daemon=True)
    thread.start()
    return thread


def test_an_engine_that_dies_under_an_update_is_waited_for_and_sent_the_same_again(
    store: RolloutStore, url_file: Path, presence: EnginePresence
) -> None:
    calls: list[str] = []

    def send() -> None:
        calls.append("send")
        if len(calls) == 1:
            later(store.forget_engine)
            later(url_file.unlink, 0.2)
            later(lambda: url_file.write_text(DEAD), 0.6)
            raise TrainingFailed("sending weights v3 failed: the engine cannot be reached")

    presence.send(send, lambda: calls.append("reach"))
    assert calls == ["send", "reach", "send"]
    assert presence.number == store.engine_number() == 2 and not presence.is_lost


def test_an_engine_that_died_while_something_else_was_done_is_reached_anew_before_anything_is_sent(
    store: RolloutStore, presence: EnginePresence
) -> None:
    calls: list[str] = []
    store.forget_engine()
    assert presence.is_lost
    presence.send(lambda: calls.append("send"), lambda: calls.append("reach"))
    assert calls == ["reach", "send"]


def test_what_a_living_engine_refuses_is_an_error_at_once(store: RolloutStore, url_file: Path) -> None:
    with serving(StubEngine()) as engine:
        url_file.write_text(engine.url)
        presence = EnginePresence(store, url_file, away_s=60, noticed_s=60)
        presence.reach()

        def send() -> None:
            raise TrainingFailed("the weights do not fit")

        began = time.monotonic()
        with pytest.raises(TrainingFailed, match="do not fit") as caught:
            presence.send(send, lambda: None)
        assert time.monotonic() - began < 5
        assert not presence.is_gone(caught.value)
        # One that says that it is dead is as good as gone.
        engine.faults["health"] = [(503, {})]
        assert presence.is_gone(caught.value)


def test_a_death_that_nobody_answers_for_ends_with_the_error(presence: EnginePresence) -> None:
    def send() -> None:
        raise EngineGone("connection refused")

    with pytest.raises(EngineGone, match="connection refused"):
        presence.send(send, lambda: None)


def test_waiting_for_the_next_engine_has_an_end(store: RolloutStore, url_file: Path, presence: EnginePresence) -> None:
    presence._away_s = 0.3
    url_file.unlink()
    store.forget_engine()
    with pytest.raises(TrainingFailed, match=r"no engine came back within 0 s: see logs/engine.log"):
        presence.send(lambda: None, lambda: None)


def test_a_learner_that_cannot_send_again_alone_is_told_to_start_again(
    store: RolloutStore, presence: EnginePresence
) -> None:
    presence.require()
    store.forget_engine()
    with pytest.raises(EngineGone, match="last checkpoint") as caught:
        presence.require()
    assert presence.is_gone(caught.value)


def test_what_is_published_to_an_engine_that_has_died_is_not_taken_for_the_next_ones(
    store: RolloutStore, presence: EnginePresence
) -> None:
    store.publish(1, engine=presence.number)
    assert store.versions().engine == 1
    store.forget_engine()  # the supervisor sees the death before the learner has said what it had sent
    store.publish(2, engine=presence.number)
    assert store.versions().engine == 0 and store.policy_version() == 2
    presence.reach()
    store.publish(2, engine=presence.number)
    assert store.versions().engine == 2


def test_without_a_supervisor_what_fails_has_failed() -> None:
    def send() -> None:
        raise EngineGone("connection refused")

    assert not OneEngine().is_lost
    with pytest.raises(EngineGone):
        OneEngine().send(send, lambda: None)


def test_a_refused_connection_says_that_the_engine_is_gone_and_a_slow_answer_does_not() -> None:
    calls = EngineCalls(DEAD, control_timeout_s=1, cleanup_timeout_s=1)
    with pytest.raises(EngineGone):
        calls.get("weight_info")
    calls.close()
    with serving(StubEngine(faults={"weight_info": ["hang"]})) as engine:
        calls = EngineCalls(engine.url, control_timeout_s=0.3, cleanup_timeout_s=1)
        with pytest.raises(TrainingFailed) as caught:
            calls.get("weight_info")
        calls.close()
    assert not isinstance(caught.value, EngineGone)
