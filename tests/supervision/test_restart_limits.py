"""How often a part may die, and how long it waits before it is started again."""

import pytest
from pydantic import ValidationError

from harness_trainer.supervision.restarts import RestartConfig, Restarts


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_first_death_costs_no_wait_and_each_further_one_twice_the_last_up_to_a_bound(clock):
    restarts = Restarts(RestartConfig(max_deaths=6, backoff_s=1.0, max_backoff_s=5.0), clock)
    assert [restarts.died("engine") for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, None]
    assert restarts.num_deaths("engine") == 7


def test_parts_are_counted_apart_and_none_means_that_the_first_death_ends_the_run(clock):
    restarts = Restarts(RestartConfig(max_deaths=1), clock)
    assert (restarts.died("engine"), restarts.died("runner")) == (0.0, 0.0)
    assert restarts.died("engine") is None
    assert Restarts(RestartConfig(max_deaths=0), clock).died("engine") is None


def test_deaths_before_the_window_are_forgotten(clock):
    restarts = Restarts(RestartConfig(max_deaths=2, window_s=60), clock)
    restarts.died("runner")
    clock.now += 40
    assert restarts.died("runner") == 1.0
    clock.now += 30  # the first is 70 s ago
    assert restarts.num_deaths("runner") == 1
    assert restarts.died("runner") == 1.0
    clock.now += 20
    assert restarts.died("runner") is None


def test_a_bound_that_makes_no_sense_is_refused():
    with pytest.raises(ValidationError):
        RestartConfig(max_deaths=-1)
    with pytest.raises(ValidationError):
        RestartConfig(window_s=0)
