"""A receiver's copy of its weights: complete, changed in place, and handed out with all that belongs together."""

import pytest
import torch
from rlhf_core import WeightSyncError
from rlhf_core.weight_sync.weight_copy import WeightCopy

WEIGHTS = {
    "embed.weight": torch.arange(6.0),
    "layers.0.attn.q.weight": torch.ones(2, 2),
    "layers.0.attn.k.weight": torch.zeros(1, 2),
    "layers.1.attn.q.weight": torch.full((2, 2), 3.0),
}


@pytest.fixture
def held():
    held = WeightCopy()
    held.take(WEIGHTS.items())
    return held


def test_it_holds_copies(held):
    source = torch.zeros(2)
    held.take([("new", source)])
    source += 1
    assert held.value("new").tolist() == [0, 0]
    assert held.nbytes == 4 * (6 + 4 + 2 + 4 + 2)


def test_weights_pass_through_as_they_are(held):
    passed = dict(held.passing([("embed.weight", torch.ones(6))]))
    assert torch.equal(passed["embed.weight"], torch.ones(6))
    assert torch.equal(held.value("embed.weight"), torch.ones(6))


def test_memory_is_used_again_unless_shape_or_dtype_changed(held):
    before = held.value("embed.weight").data_ptr()
    held.take([("embed.weight", torch.ones(6))])
    assert held.value("embed.weight").data_ptr() == before
    for other in (torch.ones(6, dtype=torch.bfloat16), torch.ones(7)):
        held.take([("embed.weight", other)])
        assert held.value("embed.weight").dtype == other.dtype
        assert torch.equal(held.value("embed.weight"), other)


def test_a_weight_comes_with_those_that_it_may_be_fused_with(held):
    def names(*changed):
        return [name for name, _ in held.with_partners(changed)]

    assert names("layers.0.attn.k.weight") == ["layers.0.attn.q.weight", "layers.0.attn.k.weight"]
    assert names("embed.weight", "layers.1.attn.q.weight") == ["embed.weight", "layers.1.attn.q.weight"]
    assert names() == []


def test_a_change_of_what_never_came_is_refused(held):
    with pytest.raises(WeightSyncError, match=r"'lm_head\.weight'"):
        held.value("lm_head.weight")
