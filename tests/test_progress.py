import os
import pickle
import sys

import pytest

from decomposable.progress import InTurn, Progress, ProgressLine, Tracker, as_duration, quiet, shown, within


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
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))


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


def test_durations_are_said_as_people_say_them():
    assert [as_duration(s) for s in (0, 42.4, 99, 150, 7320)] == ["0 s", "42 s", "99 s", "2 min", "2 h 2 min"]


def test_on_a_terminal_one_line_is_written_over_and_nothing_is_left_behind(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    with ProgressLine() as line:
        for i in range(3):
            line(f"joint training: epoch {i}")
        line("measuring")
    err = capsys.readouterr().err
    assert "\n" not in err
    assert err.count("\r") == 5
    assert err.endswith("\r\x1b[K")


def test_a_line_of_a_terminal_is_cut_to_its_width(monkeypatch, capsys):
    on_a_terminal(monkeypatch, columns=30)
    ProgressLine()("training: " + "a long story " * 10)
    text = capsys.readouterr().err.removeprefix("\r").removesuffix("\x1b[K")
    assert len(text) == 29
    ProgressLine()(Progress("training", "a long story " * 10, seconds_left=50))
    text = capsys.readouterr().err.removeprefix("\r").removesuffix("\x1b[K")
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


def test_a_line_that_stays_is_above_the_one_that_is_written_over(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    line = ProgressLine()
    line("training: step 1")
    line.say("epoch 1")
    line("training: step 2")
    assert capsys.readouterr().err == "\rtraining: step 1\x1b[K\r\x1b[Kepoch 1\n\rtraining: step 2\x1b[K"


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
        assert capsys.readouterr().err == "\rcalibrating: 2 of 60 passes\x1b[K"
    assert capsys.readouterr().err == "\r\x1b[K"


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
