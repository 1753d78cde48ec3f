"""JoinedScorer: calls that wait become one batch, and every caller gets its own rows."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from rlhf_core import (
    RUN_TOGETHER,
    Batch,
    ModelOutputs,
    TokenBudget,
    model_outputs,
    score_in_micro_batches,
    try_model,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_rollout import JoinedScorer
from transformers import AutoModelForSequenceClassification


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
        self.together = []

    def score(self, batch, outputs=("log_probs",)):
        self.rows.append(batch.rows)
        self.together.append(batch[RUN_TOGETHER].tolist())
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


def test_the_rows_of_a_call_run_together_and_with_no_others():
    engine = Lengths()
    calls = [(batch(9), ("scores",)), (batch(3, 5), ("scores",)), (batch(4), ("scores",))]
    asyncio.run(all_at_once(JoinedScorer(engine), engine, calls))
    assert engine.together == [[0], [0, 0, 1]]


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


class RewardModel:
    """A real one; the first call waits until it is let go."""

    def __init__(self, path):
        self.model = AutoModelForSequenceClassification.from_pretrained(path).eval()
        assert try_model(self.model, "reward").packing
        self.go, self.rows = threading.Event(), []

    def score(self, batch, outputs=("log_probs",)):
        self.rows.append(batch.rows)
        if len(self.rows) == 1:
            assert self.go.wait(30)
        return score_in_micro_batches(
            batch,
            outputs,
            forward=lambda part, fields: model_outputs(self.model, part, fields),
            max_tokens=TokenBudget.of(self.model, 64),
        )


def test_scores_are_the_same_bits_however_calls_come_together(tmp_path):
    """As on a quiet machine, where each call is served at once, and on a busy one, where many wait."""
    path = save_tiny_model(tmp_path, head="scalar", tied=False, tokenizer=False)
    random = torch.Generator().manual_seed(0)
    calls = []
    for lengths in [(9, 14, 5), (12,), (7, 7, 20, 3), (16, 11)]:
        one = batch(*lengths)
        ids = torch.randint(5, 500, one.token_ids.shape, generator=random)
        calls.append(replace(one, token_ids=ids.masked_fill(~one.attention_mask, 0)))
    quiet = RewardModel(path)
    quiet.go.set()
    joined = JoinedScorer(quiet)
    alone = [asyncio.run(joined.score(call, ("scores",))).scores for call in calls]
    for order in [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]:
        busy = RewardModel(path)
        asked = [(calls[place], ("scores",)) for place in order]
        found = asyncio.run(all_at_once(JoinedScorer(busy), busy, asked))
        assert len(busy.rows) == 2
        assert all(torch.equal(one.scores, alone[place]) for place, one in zip(order, found, strict=True))
