"""A line of the frozen vectors: a function, its options and inputs, and the formula that makes the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import written_out_estimators as estimators
from rlhf_core import Batch, ModelOutputs, config_from
from torch import Tensor

Tensors = dict[str, Tensor]
Function = Callable[[Tensors, dict[str, Any]], Tensors]

OUTPUTS = ("log_probs", "entropy", "log_collision", "values", "scores", "candidate_log_probs")
"""Inputs that come from a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the vectors."""

    name: str
    kind: str
    function: str
    source: str
    inputs: Tensors
    options: dict[str, Any] = field(default_factory=dict)
    ours: Function
    """Our function, in the dtype of the inputs."""
    written_out: Function
    """The same formula written out in float64, which makes the results."""

    def results(self) -> Tensors:
        """What the vectors say."""
        return self.written_out(self.inputs, self.options)


def named(name: str) -> str:
    """`function/variant`; a function whose variant has no name of its own is `plain`."""
    return name if "/" in name else f"{name}/plain"


def with_gradients(value: Callable[[Tensors], Tensors], inputs: Tensors, names: tuple[str, ...]) -> Tensors:
    """The results of a function, and the gradient of the first of them, summed, by these inputs."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    found = value({**inputs, **leaves})
    first = next(iter(found.values()))
    gradients = torch.autograd.grad(first.sum(), list(leaves.values()), allow_unused=True)
    return {
        **{name: tensor.detach() for name, tensor in found.items()},
        **{
            f"gradient/{name}": torch.zeros_like(inputs[name]) if gradient is None else gradient
            for name, gradient in zip(names, gradients, strict=True)
        },
    }


def differentiated(inputs: Tensors) -> tuple[str, ...]:
    """Names of the inputs by which a loss has a gradient."""
    return tuple(name for name in OUTPUTS if name in inputs and name != "log_collision")


def run_loss(function: Any, kind: type, rows_per_unit: int, inputs: Tensors, options: dict[str, Any]) -> Tensors:
    """Our loss on a batch of these inputs."""
    config = config_from(kind, options, what="vectors")

    def value(x: Tensors) -> Tensors:
        mask = x["response_mask"]
        batch = Batch(
            token_ids=torch.ones(mask.shape, dtype=torch.long),
            attention_mask=torch.ones_like(mask),
            response_mask=mask,
            columns={name: tensor for name, tensor in x.items() if name not in (*OUTPUTS, "response_mask")},
            rows_per_unit=rows_per_unit,
        )
        terms = function(ModelOutputs(**{name: x[name] for name in OUTPUTS if name in x}), batch, config)
        return {"loss": terms.total / terms.weight, "weight": terms.weight.to(x[differentiated(x)[0]].dtype)}

    return with_gradients(value, inputs, differentiated(inputs))


def write_out_loss(formula: Any, inputs: Tensors, options: dict[str, Any]) -> Tensors:
    """The same by a formula that is written out."""

    def value(x: Tensors) -> Tensors:
        total, weight = formula(x, SimpleNamespace(**options))
        return {"loss": total / weight, "weight": torch.tensor(weight, dtype=torch.float64)}

    return with_gradients(value, inputs, differentiated(inputs))


def direct(
    name: str,
    kind: str,
    source: str,
    inputs: Mapping[str, Tensor],
    run: Callable[..., Any],
    /,
    *,
    gradients: tuple[str, ...] = (),
    formula: Any = None,
    **options: Any,
) -> Case:
    """A function that is called with tensors and options as they are."""
    function = name.partition("/")[0]
    formula = formula or getattr(estimators, function)

    def ours_on(x: Tensors, o: dict[str, Any]) -> Tensors:
        return with_gradients(lambda y: run(y, o), x, gradients) if gradients else run(x, o)

    def written_out(x: Tensors, o: dict[str, Any]) -> Tensors:
        def value(y: Tensors) -> Tensors:
            found = formula(y, SimpleNamespace(**o))
            return found if isinstance(found, dict) else {"divergence": found}

        return with_gradients(value, x, gradients) if gradients else value(x)

    return Case(
        name=named(name),
        kind=kind,
        function=function,
        source=source,
        inputs=dict(inputs),
        options=options,
        ours=ours_on,
        written_out=written_out,
    )
