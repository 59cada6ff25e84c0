"""The engine as a part of a run: what its death means, and where the next one is."""

import pytest

from harness_trainer.engine.config import EngineConfig
from harness_trainer.errors import EngineFailed
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.supervision.engine import EnginePart


class Engine:
    """Stands for `engine.launch.Engine`: listens on port 40123 unless it is told another."""

    def __init__(self, config, log):
        self.config, self._log = config, log
        self.process = object()

    def start(self, progress):
        progress("loading")
        self._log.append(f"start {self.config.port or 'any'}")
        return f"http://127.0.0.1:{self.config.port or 40123}"

    def stop(self):
        self._log.append("stop")


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.forget_engine()
    yield store
    store.close()


def test_the_next_engine_is_on_the_same_port_and_is_announced_only_when_it_serves(store, tmp_path):
    log, said, url_file = [], [], tmp_path / "engine_url"
    part = EnginePart(
        EngineConfig(max_model_len=512), lambda config: Engine(config, log), store, url_file, status=said.append
    )
    part.hold = lambda: log.append(f"hold, of engine {store.engine_number()}")
    part.launch()
    assert not url_file.exists(), "the first one is proved fit for training before the learner hears of it"
    part.announce()
    store.publish(3, engine=1)

    part.lost()
    assert not url_file.exists()
    assert (store.versions().engine, store.policy_version(), store.engine_number()) == (0, 3, 2)
    part.launch()
    assert url_file.read_text() == part.url == "http://127.0.0.1:40123"
    assert log == ["start any", "hold, of engine 1", "stop", "start 40123"], "no call gets through before the next"
    assert said == ["engine: loading"], "later the status line is the run's"
    part.stop()
    assert log[-1] == "stop"


def test_a_run_that_ends_while_an_earlier_engine_is_being_stopped_starts_no_other(store, tmp_path):
    log = []

    class Slow(Engine):
        def stop(self):
            super().stop()
            if log.count("stop") == 1:  # in the restart's own thread; the supervisor's comes in between
                part.give_up()

    part = EnginePart(
        EngineConfig(max_model_len=512), lambda config: Slow(config, log), store, tmp_path / "url", status=log.append
    )
    part.launch()
    with pytest.raises(EngineFailed, match="the run ended before the engine was started"):
        part.launch()
    assert [line for line in log if line.startswith("start")] == ["start any"]
