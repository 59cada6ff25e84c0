"""What a person sees: unknown is a dash, plain output is one line per event, every column has its value."""

import pytest

from harness_trainer.display import COLUMNS, Display, cell, print_step_table, step_line

REPORT = {
    "step": 3,
    "policy_version": 4,
    "reward_mean": 0.5,
    "reward_std": 0.0,
    "outcomes": {"ok": 5, "infra_failed": 1},
    "num_turns": 9,
    "rows_per_rollout": 1.25,
    "trained_tokens": 300,
    "forwarded_tokens": None,
    "ratio_mean": 1.0004,
    "kl": -1.3e-09,
    "staleness_mean": 1.0,
    "sync_s": 2.5,
    "step_s": 61.0,
}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0, "0"), (0.0, "0.000"), (-1.3e-09, "-1.3e-09"), (1.5, "1.500"), ({"ok": 2}, "2 ok"), ({}, "-")],
)
def test_unknown_is_a_dash_and_zero_is_zero(value, shown):
    assert cell(value) == shown


def test_the_table_has_a_row_per_step_and_every_column(capsys):
    print_step_table([REPORT, REPORT | {"step": 4}])
    out = capsys.readouterr().out
    assert all(title in out for title, _ in COLUMNS)
    assert "5 ok 1 infra_failed" in out
    assert out.count("1.250") == 2


def test_a_run_with_several_agents_shows_each_ones_reward_and_a_run_with_one_does_not(capsys):
    pi = {"num_rollouts": 4, "reward_mean": 0.25}
    opencode = {"num_rollouts": 8, "reward_mean": None}
    print_step_table([REPORT | {"harnesses": {"opencode": opencode, "pi": pi}}, REPORT | {"harnesses": {"pi": pi}}])
    out = capsys.readouterr().out
    assert "opencode - (8), pi 0.250 (4)" in out and out.count("pi 0.250 (4)") == 2
    assert "pi 0.250 (4)" in step_line(REPORT | {"harnesses": {"opencode": opencode, "pi": pi}})
    print_step_table([REPORT | {"harnesses": {"pi": pi}}])
    assert "by agent" not in capsys.readouterr().out


def test_every_column_is_a_field_of_the_report():
    assert {key for _, key in COLUMNS} <= REPORT.keys()
    assert "forwarded -" in step_line(REPORT)


def test_plain_output_is_one_line_per_event_however_long(capsys):
    with Display(plain=True) as display:
        display.phase("x" * 500)
        display.status("first")
        display.status("second at once")  # too soon after the first to be worth a line
    lines = capsys.readouterr().err.splitlines()
    assert [line[6:] for line in lines] == ["x" * 500, "first"]
