"""The probe's tokens, the gap between two answers, and how large rounding may be."""

import math

import pytest
import torch
from rlhf_core import (
    PRECISIONS,
    ConfigError,
    ProbeGap,
    ProbeLimit,
    coarser,
    probe_limit,
    probe_tokens,
    tokens_for_experts,
)
from rlhf_core.testing.tiny import save_tiny_experts


def test_the_gap_by_hand():
    gap = ProbeGap.between([[-1.0, -2.0, -3.0], [-4.0]], [[-1.5, -2.0, -3.25], [-2.0]])
    assert (gap.mean, gap.median, gap.largest, gap.tokens) == (2.75 / 4, 0.25, 2.0, 4)
    assert gap == ProbeGap.between([[-1.5, -2.0, -3.25], [-2.0]], [[-1.0, -2.0, -3.0], [-4.0]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_far_off(bad):
    gap = ProbeGap.between([[-1.0, -2.0]], [[-1.0, bad]])
    assert gap.largest == gap.mean == math.inf
    assert not probe_limit("quantized").allows(gap)


def test_a_limit_is_calibrated_by_what_was_seen_and_never_rises():
    def gap(mean, median):
        return ProbeGap(mean=mean, median=median, largest=1.0, tokens=9)

    limit = probe_limit("bfloat16")
    usual = limit.calibrated(gap(0.04, 0.01), "bfloat16")
    assert (usual.mean, usual.median) == (0.16, 0.04)
    assert limit.calibrated(gap(1.0, 1.0), "bfloat16") == limit
    quiet = limit.calibrated(gap(0.0, 0.0), "bfloat16")
    assert 0 < quiet.mean < usual.mean
    assert 0 < quiet.median < usual.median


def test_each_number_alone_can_break_a_limit():
    limit = ProbeLimit(mean=0.1, median=0.05)
    assert limit.allows(ProbeGap(mean=0.1, median=0.05, largest=9.0, tokens=9))
    assert not limit.allows(ProbeGap(mean=0.11, median=0.01, largest=0.2, tokens=9))
    assert not limit.allows(ProbeGap(mean=0.06, median=0.06, largest=0.2, tokens=9))


def test_coarser_numbers_have_wider_limits():
    limits = [probe_limit(precision) for precision in PRECISIONS]
    assert [limit.mean for limit in limits] == sorted({limit.mean for limit in limits})
    assert coarser("bfloat16", "float32", "quantized") == "quantized"


def test_tokens_are_drawn_from_the_vocabulary_alike_everywhere():
    rows = probe_tokens(100, tokens=50, row_length=20, avoid={3, 7})
    assert rows == probe_tokens(100, tokens=50, row_length=20, avoid=frozenset({7, 3}))
    assert [len(row) for row in rows] == [20, 20, 20]
    used = {token for row in rows for token in row}
    assert used <= set(range(100)) - {3, 7}
    assert len(used) > 30
    assert rows != probe_tokens(100, tokens=50, row_length=20, avoid={3, 7}, seed=1)


def test_a_probe_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="no token"):
        probe_tokens(2, tokens=4, row_length=2, avoid={0, 1})
    with pytest.raises(ConfigError, match="row_length"):
        probe_tokens(9, tokens=4, row_length=1)


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 4), ("qwen3_moe", 8)])
def test_a_probe_passes_through_every_expert_of_every_layer(tmp_path, family, experts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_experts(tmp_path, family, tokenizer=False))
    chosen = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(
                lambda module, args, outputs, name=name: chosen.setdefault(name, set()).update(
                    outputs[2].flatten().tolist()
                )
            )
    rows = probe_tokens(512, tokens=tokens_for_experts(experts, 2), row_length=32)
    model(torch.tensor(rows))
    assert len(chosen) == 2
    assert all(found == set(range(experts)) for found in chosen.values())
