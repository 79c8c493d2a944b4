import os
import pickle
import random
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.progress import InTurn, Progress, ProgressLine, Steps, Tracker, as_duration, quiet, shown, within
from decomposable.progress.tracking import Countdown, Pace


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def on_a_terminal(monkeypatch, columns=80):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))


def on_screen(written):
    """What a terminal has on its line after each carriage return, without the blanks that wipe what was there."""
    return [line.replace("\x1b[K", "").rstrip() for line in written.split("\r")][1:]


def test_a_progress_is_text_and_knows_its_numbers():
    progress = Progress("training", "epoch 1/4", fraction=0.25, seconds_left=180)
    assert progress == "training: epoch 1/4, 3 min left"
    assert (progress.task, progress.detail, progress.fraction, progress.seconds_left) == (
        "training",
        "epoch 1/4",
        0.25,
        180,
    )
    assert Progress("decomposing") == "decomposing"
    assert Progress("training", seconds_left=5) == "training: 5 s left"


def test_it_goes_from_process_to_process():
    progress = Progress("training", "epoch 1/4", fraction=0.25, seconds_left=180)
    copy = pickle.loads(pickle.dumps(progress))
    assert copy == progress
    assert (type(copy), vars(copy)) == (Progress, vars(progress))


def test_a_part_of_something_larger_keeps_its_numbers():
    seen = []
    report = within("plain/0 (1 of 3)", seen.append)
    report(Progress("training", "epoch 1/4", fraction=0.25, seconds_left=8))
    report("decomposing")
    assert seen == ["plain/0 (1 of 3): training: epoch 1/4, 8 s left", "plain/0 (1 of 3): decomposing"]
    assert (seen[0].task, seen[0].fraction, seen[0].seconds_left) == ("plain/0 (1 of 3)", 0.25, 8)


def test_a_tracker_counts_and_estimates_the_time_left_from_what_was_done(clock):
    seen = []
    tracker = Tracker(seen.append, "calibrating", total=60, unit="passes")
    tracker.update(0)
    clock(30)
    tracker.update(15, "17 sizes")
    clock(90)
    tracker.update(60)
    assert seen == [
        "calibrating: 0 of 60 passes",
        "calibrating: 15 of 60 passes, 17 sizes, 90 s left",
        "calibrating: 60 of 60 passes, 0 s left",
    ]
    assert [p.fraction for p in seen] == [0, 0.25, 1]
    assert [p.seconds_left for p in seen] == [None, 90, 0]


def test_of_several_in_turn_the_time_left_is_that_of_all(clock):
    seen = []
    report = InTurn(seen.append, count=3)
    clock(10)
    report(Progress("measuring", "6 of 12", fraction=0.5, seconds_left=10))
    clock(10)
    report.next()
    report(Progress("decomposing"))
    clock(30)
    report(Progress("measuring", "12 of 12", fraction=1.0, seconds_left=0))
    report.next()
    assert [line.seconds_left for line in seen] == [10 + 2 * 20, None, 25]
    assert [line.fraction for line in seen] == [0.5 / 3, None, 2 / 3]


def test_of_several_kinds_each_is_a_step():
    seen = []
    report = Steps(seen.append, count=2)
    report(Progress("", "reading"))
    report(Progress("measuring", "1 of 4 batches", fraction=0.25, seconds_left=8))
    report.next()
    report("calibrating: 3 of 9 sizes")
    assert seen == [
        "reading",
        "measuring (step 1 of 2): 1 of 4 batches, 8 s left",
        "calibrating (step 2 of 2): 3 of 9 sizes",
    ]
    assert (seen[1].fraction, seen[1].seconds_left) == (0.25, 8)


# The time left


def test_the_pace_is_that_of_late():
    """A start that was ten times as slow is forgotten; what is left takes as long as it does now."""
    pace, now = Pace(0.0), 0.0
    for done in range(1, 11):
        now += 10
        slow = pace.left(now, done, 1000)
    assert slow == pytest.approx(990 * 10)
    for done in range(11, 201):
        now += 1
        fast = pace.left(now, done, 1000)
    assert 800 <= fast <= 1.1 * 800


def test_nobody_knows_at_the_start_and_everybody_at_the_end():
    pace = Pace(0.0)
    assert pace.left(0.0, 0, 100) is None
    assert pace.left(1.0, 0.5, 100) is None  # a second: too little to judge by
    assert pace.left(4.0, 2, 100) == pytest.approx(98 * 2)
    assert pace.left(14.0, 2, 100) == pytest.approx(98 * 2 - 10)  # nothing new, but time has passed
    assert pace.left(15.0, 100, 100) == 0
    assert Pace(0.0).left(0.0, 0, 0) == 0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), steps=st.integers(5, 300))
def test_at_an_uneven_pace_the_time_left_never_grows(seed, steps):
    """Steps that take up to twice as long as others, as on a machine that others use: a time left that falls."""
    generator, now, shown = random.Random(seed), 0.0, []
    pace, countdown = Pace(now), Countdown()
    for done in range(1, steps + 1):
        now += generator.uniform(1.0, 2.0)
        shown.append(countdown.shown(now, pace.left(now, done, steps)))
    known = [left for left in shown if left is not None]
    assert all(later <= earlier for earlier, later in pairwise(known))
    assert known[-1] == 0


def test_where_the_machine_has_become_slower_the_time_left_says_so():
    pace, countdown, now = Pace(0.0), Countdown(), 0.0
    for done in range(1, 101):
        now += 1
        before = countdown.shown(now, pace.left(now, done, 200))
    assert before == pytest.approx(100)
    for done in range(101, 121):
        now += 10
        after = countdown.shown(now, pace.left(now, done, 200))
    assert 80 * 7 < after <= 80 * 10


def test_work_that_turns_out_to_be_more_or_less_moves_the_time_left_smoothly(clock):
    """A grid that needs a fifth more than was thought, then a fifth less: no jump up, and the bar never goes back."""
    seen = []
    tracker = Tracker(seen.append, "calibrating", total=100)
    for done in range(1, 101):
        clock(1)
        tracker.update(done, f"{done} sizes", total=100 if done < 30 else 120 if done < 60 else 100)
    known = [line.seconds_left for line in seen if line.seconds_left is not None]
    assert all(later <= earlier for earlier, later in pairwise(known))
    assert seen == sorted(seen, key=lambda line: line.fraction)
    assert seen[49].startswith("calibrating: 50 sizes, ")  # without a unit, the detail says how much


def test_counts_are_read_as_people_read_them(clock):
    seen = []
    Tracker(seen.append, "measuring", total=25000, unit="batches").update(12000.0)
    Tracker(seen.append, "measuring", total=41.25, unit="passes").update(4.517)
    assert seen == ["measuring: 12,000 of 25,000 batches", "measuring: 4.52 of 41.2 passes"]


def test_durations_are_said_as_people_say_them():
    assert [as_duration(s) for s in (0, 42.4, 99, 150, 7320)] == ["0 s", "42 s", "99 s", "2 min", "2 h 2 min"]


# What is shown


def test_on_a_terminal_one_line_is_written_over_and_nothing_is_left_behind(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    with ProgressLine() as line:
        for i in range(3):
            line(f"joint training: epoch {i}")
            clock(1)
        line("measuring")
    err = capsys.readouterr().err
    assert "\n" not in err
    assert [line for line in on_screen(err) if line] == [*(f"joint training: epoch {i}" for i in range(3)), "measuring"]
    assert on_screen(err)[-1] == ""


def test_a_line_of_a_terminal_is_cut_to_its_width(monkeypatch, capsys):
    on_a_terminal(monkeypatch, columns=30)
    ProgressLine()("training: " + "a long story " * 10)
    assert len(on_screen(capsys.readouterr().err)[0]) == 29
    ProgressLine()(Progress("training", "a long story " * 10, seconds_left=50))
    text = on_screen(capsys.readouterr().err)[0]
    assert (len(text), text[-9:]) == (29, "50 s left")  # which one looks for


def test_what_a_terminal_would_obey_is_not_shown(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line("training: \x1b[2Jstep\n1")
    line.say("done \x1b]0;title\x07")
    err = capsys.readouterr().err
    assert "\x1b[2J" not in err
    assert "\x1b]" not in err
    assert err.count("\n") == 1


def test_a_line_that_stays_is_above_the_one_that_is_written_over(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line("training: step 1")
    line.say("epoch 1")
    clock(1)
    line("training: step 2")
    assert [part for part in on_screen(capsys.readouterr().err) if part] == [
        "training: step 1",
        "epoch 1",
        "training: step 2",
    ]


def test_a_terminal_is_not_written_to_more_often_than_one_can_see(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    for i in range(1000):
        line(f"training: step {i}")
        clock(0.001)
    assert 5 <= capsys.readouterr().err.count("\r") <= 11
    clock(1)
    line.tick()
    assert "step 999" in capsys.readouterr().err  # the last news is not lost


def test_between_news_the_time_left_counts_down(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line(Progress("calibrating", "3 of 9 sizes", fraction=1 / 3, seconds_left=30))
    for _ in range(2):
        clock(12)
        line.tick()
    clock(12)
    line.tick()
    found = re.findall(r"(\d+) s left", capsys.readouterr().err)
    assert found == ["30", "18", "6", "0"]


def test_where_nobody_knows_how_long_it_takes_it_says_for_how_long_it_has(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line("exporting: tracing the network")
    for seconds in (2, 10):
        clock(seconds)
        line.tick()
    line("exporting: comparing")
    assert on_screen(capsys.readouterr().err) == [
        "exporting: tracing the network",
        "exporting: tracing the network",
        "exporting: tracing the network, 12 s so far",
    ]


def test_the_first_line_of_a_command_is_there_at_once(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    ProgressLine()(Progress("", "reading the network"))
    assert "reading the network" in capsys.readouterr().err


def test_a_terminal_shows_a_bar(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line(Progress("calibrating", "12 of {48} sizes", fraction=0.25, seconds_left=90))
    [drawn] = on_screen(capsys.readouterr().err)
    assert drawn.startswith("calibrating  25%|")
    assert drawn.endswith("| 12 of {48} sizes, 90 s left")
    assert len(drawn) <= 79
    line(Progress("writing"))  # of which nobody knows how much is done
    assert on_screen(capsys.readouterr().err) == ["writing"]


@pytest.mark.parametrize("columns", [5, 30, 60, 200])
@pytest.mark.parametrize("fraction", [0.0, 0.37, 1.0])
def test_a_bar_is_as_wide_as_there_is_room(monkeypatch, capsys, columns, fraction):
    on_a_terminal(monkeypatch, columns)
    line = ProgressLine()
    line(Progress("calibrating", "12 of 48 sizes", fraction=fraction))
    [drawn] = on_screen(capsys.readouterr().err)
    assert len(drawn) <= min(columns - 1, 75)
    assert (f"{100 * fraction:3.0f}%|" in drawn) == (columns > 45)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_a_real_terminal_is_drawn_on_and_left_clean(tmp_path):
    import subprocess

    script = tmp_path / "work.py"
    script.write_text(
        "import sys\n"
        "from decomposable.progress import Progress, ProgressLine, Tracker\n"
        "with ProgressLine() as line:\n"
        "    line(Progress('', 'reading'))\n"
        "    Tracker(line, 'calibrating', total=4, unit='sizes').update(1)\n"
        "    line.say('stays')\n"
    )
    master, slave = os.openpty()
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    subprocess.run([sys.executable, str(script)], stderr=slave, check=True, env=environment)
    os.close(slave)
    drawn = b""
    try:
        while piece := os.read(master, 4096):
            drawn += piece
    except OSError:  # Linux: the other end is closed
        pass
    os.close(master)
    text = drawn.decode()
    assert text.index("reading") < text.index("calibrating") < text.index("1 of 4 sizes") < text.index("stays")
    assert on_screen(text)[-2:] == ["stays", ""]
    assert text.endswith("stays\r\n")


def test_elsewhere_there_is_a_line_per_task_and_one_a_minute(clock, capsys):
    line = ProgressLine()
    line(Progress("", "reading"))
    for i in range(5):
        line(f"training: step {i}")
        clock(25)
    line.say("epoch 1")
    line("training: step 5")
    line("measuring: 0.5")
    line.detail("not said")
    line.close()
    assert capsys.readouterr().err == "training\ntraining: step 3\nepoch 1\nmeasuring\n"


def test_elsewhere_a_minute_without_news_has_its_line_too(clock, capsys):
    line = ProgressLine()
    line(Progress("calibrating", "3 of 9 sizes", seconds_left=300))
    clock(30)
    line.tick()
    clock(31)
    line.tick()
    assert capsys.readouterr().err == "calibrating\ncalibrating: 3 of 9 sizes, 4 min left\n"


def test_what_is_closed_ticks_no_more(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    with ProgressLine() as line:
        line("training: step 1")
    capsys.readouterr()
    clock(10)
    line.tick()
    assert capsys.readouterr().err == ""


def test_verbose_says_more_and_more_often(clock, capsys):
    line = ProgressLine(is_verbose=True)
    for i in range(4):
        line(f"training: step {i}")
        clock(3)
    line.detail("said")
    assert capsys.readouterr().err == "training: step 0\ntraining: step 2\nsaid\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_says_nothing(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with ProgressLine(is_quiet=True) as line:
        line("training: step 1")
        line.say("epoch 1")
        line.detail("more")
    assert capsys.readouterr() == ("", "")


def test_from_python_work_of_more_than_two_seconds_is_shown_on_a_terminal(monkeypatch, clock, capsys):
    on_a_terminal(monkeypatch)
    with shown(None) as report:
        report(Progress("calibrating", "1 of 60 passes"))
        assert capsys.readouterr().err == ""
        clock(2.1)
        report(Progress("calibrating", "2 of 60 passes"))
        assert on_screen(capsys.readouterr().err) == ["calibrating: 2 of 60 passes"]
    assert on_screen(capsys.readouterr().err)[-1] == ""


def test_from_python_nothing_is_shown_elsewhere_or_where_one_asks_for_nothing(monkeypatch, clock, capsys):
    with shown(None) as report:
        clock(100)
        report(Progress("calibrating"))
    on_a_terminal(monkeypatch)
    with shown(quiet) as report:
        clock(100)
        report(Progress("calibrating"))
    assert capsys.readouterr().err == ""


def test_from_python_a_report_of_ones_own_is_told_everything():
    seen = []
    with shown(seen.append) as report:
        report(Progress("calibrating"))
    assert seen == ["calibrating"]
