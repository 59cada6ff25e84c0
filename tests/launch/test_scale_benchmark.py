"""The parts of `benchmarks.scale` that its figures rest on, in their smallest form. What they measure is no test's."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale_gateway, scale_runner
from benchmarks.process_use import Use, table
from benchmarks.scale_docker import _in_mb
from benchmarks.scale_gateway import Level, Streams
from benchmarks.stream_load import Found, Spread
from benchmarks.waiting_boxes import answer_to
from sandboxes import inside


def test_percentiles_are_milliseconds_of_what_was_seen():
    assert Spread.of([0.001 * n for n in range(1, 101)]) == Spread(50.0, 90.0, 99.0, 100.0)
    assert Spread.of([0.002]) == Spread(2.0, 2.0, 2.0, 2.0)
    assert str(Spread.of([]).p50) == "nan", "nothing seen is no delay of 0"


def test_the_use_of_a_process_grows_with_what_it_does():
    busy = "import time\nheld = b'x' * 50_000_000\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        try:
            first = Use.of(process.pid)
            while (use := Use.of(process.pid)).uss < 50 or use.cpu_s <= first.cpu_s:
                assert time.monotonic() - first.at < 20
                time.sleep(0.05)
        finally:
            process.kill()
    assert use.share_since(first) > 0.0 and use.rss >= use.pss >= use.uss and use.num_files >= 3
    assert Use.of(process.pid).rss == 0.0, "a process that has ended takes nothing"


def _level(num: int, direct: float, through: float) -> Level:
    def found(delay: float) -> Found:
        spread = Spread(delay, delay, 2 * delay, 9.0)
        return Found(spread, spread, spread, num_pieces=100, num_streams=10, least_open=num, seconds=10.0, cpu=0.1)

    use = Use.of(os.getpid())
    return Level(num, found(direct), found(through), use, use, cpu=0.5)


@pytest.mark.parametrize(("delay", "word"), [(1.5, ": flat"), (3.5, "NOT flat")])
def test_flat_is_what_the_gateway_adds_and_not_what_engine_and_agents_take(delay, word):
    levels = [_level(10, 0.5, 1.0), _level(500, 8.0, 8.0 + delay), _level(1000, 8.0, 400.0)]
    text = scale_gateway.report(levels, Streams())
    assert word in text and "500 streams against 10" in text
    assert f"| {delay:.1f} / {2 * delay:.1f} |" in text


def test_what_a_call_and_a_piece_cost_is_told_apart_by_streams_of_two_lengths():
    one = _level(100, 0.5, 1.0)
    long = replace(one, cpu=0.09, through=replace(one.through, num_streams=100, num_pieces=10_000))
    short = replace(one, cpu=0.13, through=replace(one.through, num_streams=500, num_pieces=10_000))
    assert scale_gateway.price(long, short) == (pytest.approx(0.001), pytest.approx(80e-6))


def test_a_box_in_which_an_agent_waits_says_so_when_the_wait_is_over():
    wrapped = ["/bin/sh", "-c", "wrapper", "sh", "/", "", inside.SHELL, "-c"]
    status = answer_to([*wrapped, inside.JOB_STATUS, "sh", "nonce", "/.sandbox/jobs/job-0", "6000", "4000000"])
    assert (status.out, status.err, status.wait_s) == (b"running - 0 0 - -\nnonce 0 0\n", b"nonce 0 0\n", 60.0)
    ended = answer_to([*wrapped, inside.JOB_STATUS, "sh", "n1", "/.sandbox/jobs/job-0", "6000", "4000000"], agent_s=2.5)
    assert (ended.out, ended.wait_s) == (b"ended 0 0 0 0 100\nn1 0 0\n", 2.5)
    assert answer_to([*wrapped, inside.JOB_NEW, "sh", "n2"]).out == b"n2 0 0\n"
    with pytest.raises(ValueError, match="no script of ours"):
        answer_to([*wrapped[:6], "make", "all"])


def test_dockers_sizes_are_read_in_every_unit():
    assert [round(_in_mb(text), 3) for text in ("6.5MiB", "1GiB", "512KiB", "0B")] == [6.816, 1073.742, 0.524, 0.0]


def test_a_table_is_markdown():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_streams_are_read_through_a_real_gateway(tmp_path: Path):
    streams = Streams(tokens=4, interval_ms=20, warm_s=0.1, measure_s=0.8)
    level = scale_gateway.level(tmp_path, 3, streams)
    for found in (level.direct, level.through):
        assert found.num_pieces >= found.num_streams >= 1
        assert 0 < found.behind.p50 <= found.behind.worst and found.first_text.p50 >= found.first_behind.p50
    assert level.use.rss > 20 and level.cpu >= 0.0
    assert "| 3 |" in scale_gateway.report([level, replace(level, num_streams=4)], streams)


def test_a_real_runner_holds_sandboxes_whose_agents_wait(tmp_path: Path):
    found = scale_runner.carried(tmp_path, 10, seconds=0.5, settle_s=0.1)
    assert found.num_sandboxes == 10 and found.cpu >= 0.0 and found.use.rss > 30
    assert found.use.num_sockets >= 10, "each wait is a connection to its sandbox"
    turning = scale_runner.Turnover(300, 10.0, 0.04, 0.4)
    text = scale_runner.report([found], turning)
    assert "| 10 |" in text and "10.0 a second at 40 % of a core, 40 ms of CPU each" in text
