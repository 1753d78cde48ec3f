"""JoinedScorer: calls that wait become one batch, and every caller gets its own rows."""

import asyncio
import threading

import pytest
import torch
from rlhf_core import Batch, ModelOutputs
from rlhf_rollout import JoinedScorer


def batch(*lengths, wide=0):
    width = max(*lengths, wide)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids[mask] = 7
    return Batch(token_ids=ids, attention_mask=mask, response_mask=mask & (torch.arange(width) > 0))


class Lengths:
    """Scores are lengths; values are positions. The first call waits until it is let go."""

    def __init__(self):
        self.go = threading.Event()
        self.rows = []

    def score(self, batch, outputs=("log_probs",)):
        self.rows.append(batch.rows)
        if len(self.rows) == 1:
            assert self.go.wait(30)
        values = torch.arange(batch.token_ids.shape[1]).float().expand(batch.rows, -1)
        return ModelOutputs(
            scores=batch.lengths.float() if "scores" in outputs else None,
            values=values if "values" in outputs else None,
        )


async def all_at_once(joined, engine, calls):
    tasks = [asyncio.ensure_future(joined.score(batch, outputs)) for batch, outputs in calls]
    while not engine.rows:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)  # the others are waiting now
    engine.go.set()
    return await asyncio.gather(*tasks)


def test_calls_that_wait_are_joined_and_dealt_out_again():
    engine = Lengths()
    calls = [(batch(2), ("scores",)), (batch(3, 5), ("scores",)), (batch(4), ("scores",)), (batch(6), ("values",))]
    found = asyncio.run(all_at_once(JoinedScorer(engine), engine, calls))
    assert engine.rows == [1, 3, 1]
    assert [outputs.scores.tolist() for outputs in found[:3]] == [[2], [3, 5], [4]]
    assert found[3].values.shape == (1, 6)


def test_more_rows_than_wanted_at_a_time_are_not_joined():
    engine = Lengths()
    calls = [(batch(2), ("scores",)), (batch(3, 5), ("scores",)), (batch(4, 4), ("scores",))]
    asyncio.run(all_at_once(JoinedScorer(engine, max_rows=3), engine, calls))
    assert engine.rows == [1, 2, 2]


def test_a_batch_smaller_than_the_ranks_is_filled_up():
    engine = Lengths()
    engine.go.set()
    outputs = asyncio.run(JoinedScorer(engine, min_rows=4).score(batch(2, 3), ("scores",)))
    assert engine.rows == [4]
    assert outputs.scores.tolist() == [2, 3]


def test_an_error_reaches_every_caller_and_the_next_call_works():
    class Broken(Lengths):
        def score(self, batch, outputs=("log_probs",)):
            super().score(batch, outputs)
            if len(self.rows) == 2:
                raise RuntimeError("no memory")
            return ModelOutputs(scores=batch.lengths.float())

    engine = Broken()
    joined = JoinedScorer(engine)

    async def three():
        tasks = [asyncio.ensure_future(joined.score(batch(n), ("scores",))) for n in (2, 3, 4)]
        while not engine.rows:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        engine.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(three())
    assert first.scores.tolist() == [2]
    assert [str(error) for error in others] == ["no memory"] * 2
    assert asyncio.run(joined.score(batch(5), ("scores",))).scores.tolist() == [5]


def test_a_caller_that_left_costs_the_others_nothing():
    engine = Lengths()
    joined = JoinedScorer(engine)

    async def leave():
        tasks = [asyncio.ensure_future(joined.score(batch(n), ("scores",))) for n in (2, 3, 4)]
        while not engine.rows:
            await asyncio.sleep(0.001)
        tasks[1].cancel()
        await asyncio.sleep(0.02)
        engine.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(leave())
    assert isinstance(found[1], asyncio.CancelledError)
    assert (found[0].scores.tolist(), found[2].scores.tolist()) == ([2], [4])
    assert engine.rows == [1, 1]


def test_closing_ends_those_who_wait():
    engine = Lengths()
    joined = JoinedScorer(engine)

    async def close():
        tasks = [asyncio.ensure_future(joined.score(batch(n), ("scores",))) for n in (2, 3)]
        while not engine.rows:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        joined.close()
        engine.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = asyncio.run(close())
    assert first.scores.tolist() == [2]
    assert isinstance(second, asyncio.CancelledError)


@pytest.mark.parametrize("wide", [0, 9])
def test_padding_of_a_caller_does_not_matter(wide):
    engine = Lengths()
    engine.go.set()
    outputs = asyncio.run(JoinedScorer(engine).score(batch(2, 3, wide=wide), ("values",)))
    assert outputs.values.shape[0] == 2
