"""Requests joined into batches."""

import threading

import pytest
from rlhf_core import ConfigError
from rlhf_launch.reward_server.batching import BatchedRows, BatchLimits, QueueFullError, ServerClosingError


class Scorer:
    """Scores a row by its sum; each call waits until it is let go."""

    def __init__(self, held=False):
        self.calls = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0 if held else 1000)

    def __call__(self, rows):
        self.calls.append([list(row) for row in rows])
        self.begun.release()
        assert self.go.acquire(timeout=60)
        if any(row == [13] for row in rows):
            raise ValueError("thirteen")
        return [float(sum(row)) for row in rows]


@pytest.fixture
def open_batches():
    opened = []

    def make(scorer, **limits):
        opened.append((BatchedRows(scorer, BatchLimits(**limits)), scorer))
        return opened[-1][0]

    yield make
    for batches, scorer in opened:
        for _ in range(1000):
            scorer.go.release()
        batches.close()


def test_what_waits_is_joined_up_to_the_tokens_of_a_batch(open_batches):
    scorer = Scorer(held=True)
    batches = open_batches(scorer, max_batch_tokens=4, wait_s=0.0)
    first = batches.submit([[1]])
    assert scorer.begun.acquire(timeout=60)
    others = [batches.submit(rows) for rows in ([[2, 2], [1]], [[5]], [[6]], [[7] * 9])]
    for _ in range(9):
        scorer.go.release()
    assert first.result(60) == [1.0]
    assert [other.result(60) for other in others] == [[4.0, 1.0], [5.0], [6.0], [63.0]]
    assert scorer.calls == [[[1]], [[2, 2], [1], [5]], [[6]], [[7] * 9]]


def test_the_first_waits_for_others_until_the_batch_is_full(open_batches):
    scorer = Scorer()
    batches = open_batches(scorer, max_batch_tokens=3, wait_s=600.0)
    futures = [batches.submit([[n]]) for n in range(3)]  # the third ends the wait
    assert [future.result(60) for future in futures] == [[0.0], [1.0], [2.0]]
    assert len(scorer.calls) == 1


def test_more_than_may_wait_is_refused_and_a_lone_large_one_is_not(open_batches):
    scorer = Scorer(held=True)
    batches = open_batches(scorer, max_batch_tokens=4, wait_s=0.0, max_waiting_tokens=3)
    large = batches.submit([[1] * 10])
    assert scorer.begun.acquire(timeout=60)
    kept = batches.submit([[1, 1]])
    with pytest.raises(QueueFullError) as found:
        batches.submit([[1, 1]])
    assert found.value.retry_after_s >= 1
    assert batches.waiting == 1
    for _ in range(9):
        scorer.go.release()
    assert (large.result(60), kept.result(60)) == ([10.0], [2.0])


def test_a_cancelled_request_costs_nothing(open_batches):
    scorer = Scorer(held=True)
    batches = open_batches(scorer, wait_s=0.0)
    batches.submit([[1]])
    assert scorer.begun.acquire(timeout=60)
    left, kept = batches.submit([[2]]), batches.submit([[3]])
    assert left.cancel()
    for _ in range(9):
        scorer.go.release()
    assert kept.result(60) == [3.0]
    assert scorer.calls == [[[1]], [[3]]]


def test_a_failed_batch_is_its_own_and_the_next_one_runs(open_batches):
    batches = open_batches(Scorer(), wait_s=0.0)
    with pytest.raises(ValueError, match="thirteen"):
        batches.submit([[13]]).result(60)
    assert batches.submit([[1]]).result(60) == [1.0]


def test_what_waits_is_finished_at_the_end():
    scorer = Scorer()
    batches = BatchedRows(scorer, BatchLimits(wait_s=600.0))
    future = batches.submit([[4]])
    batches.close()
    assert future.result(0) == [4.0]
    with pytest.raises(ServerClosingError):
        batches.submit([[1]])


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="max-wait-ms"):
        BatchLimits(wait_s=-1.0)
