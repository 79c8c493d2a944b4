"""Sizes that change under load: every answer is that of one size, and of one that was in force during the request."""

import threading
import time

import numpy as np
import pytest

from decomposable_edge import AnySizeSession

SWITCHES, REQUESTERS = 2000, 6
RATIOS = (0.1, 0.3, 0.4, 0.6, 0.8, 1.0)  # more than are kept, so that sessions are made all the time


class Load:
    """Threads that send requests until it is over; what they saw that cannot be is in `wrong`."""

    def __init__(self, session, x, is_right):
        self.over, self.wrong, self.answers = threading.Event(), [], 0
        self._session, self._x, self._is_right = session, x, is_right
        self._threads = [threading.Thread(target=self._request) for _ in range(REQUESTERS)]

    def _request(self):
        count = 0
        while not self.over.is_set():
            try:
                if not self._is_right(lambda: self._session.run(self._x).tobytes()):
                    self.wrong.append("an answer of no size in force")
            except Exception as error:
                self.wrong.append(repr(error))
            count += 1
            if self.wrong:
                break
        self.answers += count

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def session(tiny):
    return AnySizeSession(tiny, threads=1, keep=2)


@pytest.fixture
def x():
    return np.random.default_rng(5).standard_normal((3, 6)).astype(np.float32)


@pytest.fixture
def answers(tiny, x):
    """The answer of every size, from sessions of their own."""
    found = {ratio: AnySizeSession(tiny, ratio=ratio, threads=1).run(x).tobytes() for ratio in RATIOS}
    assert len(set(found.values())) == len(RATIOS)
    return found


@pytest.mark.slow
def test_every_answer_is_of_a_size_that_was_current(session, x, answers):
    order = [RATIOS[i] for i in np.random.default_rng(0).integers(0, len(RATIOS), SWITCHES)]
    begun, done = -1, -1

    def is_right(run):
        first = done
        answer = run()
        last = begun
        current = [order[i] if i >= 0 else 1.0 for i in range(first, last + 1)]
        return answer in {answers[ratio] for ratio in current}

    with Load(session, x, is_right) as load:
        for i, ratio in enumerate(order):
            begun = i
            session.resize(ratio=ratio)
            done = i
            assert session.plan() == session.plan(ratio=ratio)
            if load.wrong:
                break
            if i % 16 == 0:
                time.sleep(0.001)  # let requests through that see one size only
    assert load.wrong == []
    assert load.answers > REQUESTERS


def test_several_threads_may_resize(session, x, answers):
    def is_right(run):
        return run() in answers.values()

    def switch(seed):
        for i in np.random.default_rng(seed).integers(0, len(RATIOS), SWITCHES // 4):
            plan = session.resize(ratio=RATIOS[i])
            assert plan == session.plan(ratio=RATIOS[i])

    switchers = [threading.Thread(target=switch, args=(seed,)) for seed in range(2)]
    with Load(session, x, is_right) as load:
        for thread in switchers:
            thread.start()
        for thread in switchers:
            thread.join()
    assert load.wrong == []
    assert session.run(x).tobytes() == answers[next(r for r in RATIOS if session.plan(ratio=r) == session.plan())]
    assert len(session.kept) == 2


def test_the_check_finds_a_torn_answer(session, x, answers):
    """It must be able to fail: an answer half of one size and half of another is none."""
    half = session.run(x[:1]).tobytes()
    session.resize(ratio=0.1)
    torn = half + session.run(x[1:]).tobytes()
    assert torn not in answers.values()
