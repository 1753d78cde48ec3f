"""The rows that a plan's passes go through."""

import pytest
from rlhf_core import EngineConfig, OptimizerConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.planning import trial_batch
from rlhf_launch.planning.memory import EnginePlanner
from rlhf_launch.planning.trial_batch import RowShape


@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("tokens", [10, 24, 1000, 16384])
@pytest.mark.parametrize("shape", [(8, 16), (600, 400), (1, 1)])
def test_a_batch_has_the_tokens_asked_for_in_few_rows(shape, tokens, one_row):
    rows = RowShape(prompt=shape[0], response=shape[1])
    batch = rows.batch(tokens, one_row=one_row)
    assert batch.rows <= (1 if one_row else 64)
    wanted = max(tokens, rows.length)
    assert wanted - batch.token_ids.shape[1] - rows.length < batch.tokens <= wanted
    # Each row of the run has its response's tokens, in whatever row it stands.
    assert batch.response_tokens == batch.tokens * rows.response // rows.length


def test_short_rows_that_stand_together_need_the_memory_of_rows_apart(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path, tokenizer=False)
    config = EngineConfig(model=model, max_tokens_per_micro_batch=4096, optimizer=OptimizerConfig())

    def planned():
        plan = EnginePlanner(config, ranks=1, rows=RowShape(prompt=8, response=8)).plan(4096)
        assert not plan.reason
        return plan

    together = planned()
    assert together.step > together.score > 0
    monkeypatch.setattr(trial_batch, "_MOST_ROWS", 256)
    apart = planned()
    assert together.step == pytest.approx(apart.step, rel=0.02)
    assert together.score == pytest.approx(apart.score, rel=0.02)
