"""Mixture-of-experts models under ZeRO-3."""

from __future__ import annotations

from typing import Any

from torch import nn


def mark_expert_blocks(model: Any) -> list[str]:
    """Let ZeRO-3 gather the experts of a block together; returns the names of these blocks.

    Where experts are modules of their own, a rank calls only those its tokens are routed to, and would gather
    parameters that no other rank gathers: the ranks would wait for each other for ever. Experts that Transformers
    keeps fused in one tensor need no mark.
    """
    names = [
        name
        for name, module in model.named_modules()
        if any("expert" in child and isinstance(part, nn.ModuleList) for child, part in module.named_children())
    ]
    if names:
        from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules_by_name

        set_z3_leaf_modules_by_name(model, names)
    return names
