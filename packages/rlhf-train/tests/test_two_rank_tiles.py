"""What the checks of two_rank_tiles.py measured in two processes; see conftest.py."""

import pytest

pytestmark = pytest.mark.stack

CASES = ("0", "2", "3", "3-cut", "3-offloaded", "3-checkpointing", "2-sequence", "3-sequence")


@pytest.mark.parametrize("case", [*CASES, "3-sequence-checkpointing", "0-critic", "3-critic", "3-critic-sequence"])
def test_tiles_and_shared_rows_give_the_gradients_and_scores_of_one_process_without(measured, case):
    found = measured["tiled_mlps"][case]
    assert found["gradients"] < 1e-6
    assert found["norm"] < 1e-6
    assert found["scores"] < 1e-6
    assert found["packing"]
    assert found["goes_on"]


@pytest.mark.parametrize(
    "case", ["0-lora", "3-lora", "3-lora-mlp", "3-lora-mlp-checkpointing", "2-frozen", "3-frozen"]
)
def test_tiles_train_adapters_and_layers_above_frozen_ones(measured, case):
    found = measured["tiled_mlps_in_part"][case]
    assert found["gap"] < 1e-6
    assert found["moved"] > 1e-3


@pytest.mark.parametrize("role", ["reference", "reward"])
@pytest.mark.parametrize("case", ["0-1", "0-2", "3-1", "3-2"])
def test_frozen_roles_score_over_tiles_and_shared_rows(measured, role, case):
    """`case` is the ZeRO stage and the ranks that share rows."""
    assert measured["tiled_frozen_roles"][f"{role}-{case}"] < 1e-6
