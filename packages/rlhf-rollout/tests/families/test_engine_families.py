"""Families that vLLM loads in ways of their own, through weight syncs; `nox -s families` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_families import judge

pytestmark = pytest.mark.stack

SPECIAL = {
    "gpt_oss": "experts and sinks are copied past the weight loaders",
    "deepseek_v3": "heads come as a dimension of their own to the rotary kernel",
    "mamba2": "carries a state",
    "cohere2": "its window is one token longer in vLLM",
    "olmo2": "vLLM runs the class of Transformers that the trainer has, too",
}
"""Families, and what is special about them. Mixtral and Qwen3-MoE are in test_experts, Qwen2 in test_backend."""


@pytest.mark.parametrize("kind", SPECIAL)
def test_log_probs_are_the_trainers_before_and_after_syncs(kind: str, tmp_path: Path) -> None:
    verdict = judge(kind, tmp_path, syncs=2)
    assert verdict.outcome == "equal", verdict.reason
    assert len(verdict.after) == 2


def test_a_family_without_a_kernel_on_cpus_is_declined_with_the_reason(tmp_path: Path) -> None:
    verdict = judge("jamba", tmp_path)
    assert verdict.outcome == "declined"
    assert "selective_scan_fwd" in verdict.reason
