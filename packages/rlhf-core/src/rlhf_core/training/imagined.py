"""Passes of a model that has no storage: the real code of a step under fake tensors, for the memory it would take.

Floating tensors have a shape, a type and no numbers (torch's `FakeTensorMode`); ids, masks and lengths are real, so
that rows are packed and cut as ever. What living tensors would hold is counted as in `MemoryMeter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.adapters.quantized import BYTES_OF_CODE, quantized_layers
from rlhf_core.data.batch import Batch
from rlhf_core.errors import CapabilityError
from rlhf_core.interfaces.engine_config import EngineConfig
from rlhf_core.interfaces.loss import Loss
from rlhf_core.model.forward import model_outputs
from rlhf_core.model.log_probs import chunks_of, head_chunk
from rlhf_core.model.tiled_mlp import tiled_mlps
from rlhf_core.training.accumulation import accumulate, score_in_micro_batches
from rlhf_core.training.deepened import layer_of
from rlhf_core.training.imagining import (
    Imagining,
    built,
    config_of,
    deepening_of,
    fake_mode,
    imagining,
    put_on_host,
)
from rlhf_core.training.micro_batches import TokenBudget, counted_tokens

_ANY_LENGTH = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSize:
    """One parameter of a model."""

    name: str
    elements: int
    bytes: int
    trained: bool
    values_bytes: int = 0
    """Of the values that each use makes of its 4-bit codes (QLoRA); 0 where it holds values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What happens between two calls of modules in a pass: the parameters that are used, and the highest memory."""

    used: tuple[int, ...]
    """Places of the parameters, in `ImaginedModel.parameters`, of the module that is called or left."""
    begins: bool
    """Whether the module is called here (forwards or backwards), or left."""
    backward: bool
    peak: int
    """Most bytes of tensors that the pass has made and not freed, until the next moment."""
    flops: int = 0
    """Floating-point operations until the next moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImaginedPass:
    """A pass over one micro-batch."""

    tokens: int
    """That are run, as budgets count them."""
    peak: int
    """Most bytes at a time beside weights, gradients and optimizer: activations, logits, the loss's own."""
    moments: tuple[Moment, ...]
    """In the order of time, for what must be there beside it at each (`rlhf_train.planned_memory`)."""
    flops: int = 0
    """Floating-point operations of the matrix products, recomputed ones included."""


def _size_of(name: str, parameter: Tensor, *, coded: bool) -> ParameterSize:
    elements, size = parameter.numel(), parameter.numel() * parameter.element_size()
    held = int(elements * BYTES_OF_CODE) if coded else size
    values = size if coded else 0
    return ParameterSize(
        name=name, elements=elements, bytes=held, trained=parameter.requires_grad, values_bytes=values
    )


class ImaginedModel:
    """The model of a role as its configuration describes it, made in about a second whatever its size.

    >>> model = ImaginedModel(EngineConfig(model="meta-llama/Llama-2-70b-hf"))            # doctest: +SKIP
    >>> sum(one.bytes for one in model.parameters)                                         # doctest: +SKIP

    Raises:
        ConfigError: there is no configuration of a model at this path, or Transformers does not know its family.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        its = config_of(config)
        self._deepening = deepening_of(its)
        with torch.device("meta"):
            self._model = built(config, its)
        self._mode = fake_mode()
        with imagining(self._mode):
            put_on_host(self._model)
        layers = quantized_layers(self._model) if config.quantize is not None else []
        coded = {id(layer.weight) for layer in layers}
        self._shallow = tuple(
            _size_of(name, parameter, coded=id(parameter) in coded)
            for name, parameter in self._model.named_parameters()
        )
        self.parameters: tuple[ParameterSize, ...] = self._shallow
        """Of the model at its full depth."""
        if self._deepening is not None:
            self.parameters = tuple(self._deepening.parameters(self._shallow))
        self.buffers = sum(buffer.numel() * buffer.element_size() for buffer in self._model.buffers())
        self._layers: int = (
            its.get_text_config().num_hidden_layers if self._deepening is None else self._deepening.layers
        )
        self._places = {id(parameter): place for place, (_, parameter) in enumerate(self._model.named_parameters())}

    @property
    def text(self) -> Any:
        """The model's configuration, of its text part."""
        return self._model.config.get_text_config()

    @property
    def head(self) -> tuple[int, ...]:
        """Places of the parameters of the output head."""
        head = self._model.get_output_embeddings()
        if head is None:
            return ()
        places = self._places_of(head)
        if self._deepening is None:
            return places
        deep = self._deepening.places(self._shallow)
        return tuple(deep[place][0] for place in places)

    @property
    def layers(self) -> int:
        """How many the model has."""
        return self._layers

    def step(self, batch: Batch, loss: Loss) -> ImaginedPass:
        """Forwards and backwards over the whole batch as one micro-batch.

        Gradients of parameters live until they are there, and count where a sharding keeps them.

        Raises:
            CapabilityError: the model's code needs numbers to go on (a mixture of experts that routes by them).
        """
        self._model.train()

        def run() -> None:
            accumulate(
                batch,
                loss,
                forward=lambda rows, fields: model_outputs(self._model, rows, fields),
                backward=lambda total, last: total.backward(),
                max_tokens=self._whole,
            )

        return self._run(batch, run)

    def score(self, batch: Batch, fields: Sequence[str] = ("log_probs",)) -> ImaginedPass:
        """Forwards alone over the whole batch as one micro-batch.

        Raises:
            CapabilityError: see `step`.
        """
        self._model.eval()

        def run() -> None:
            score_in_micro_batches(
                batch,
                fields,
                forward=lambda rows, names: model_outputs(self._model, rows, names),
                max_tokens=self._whole,
            )

        return self._run(batch, run)

    @property
    def _whole(self) -> TokenBudget:
        return replace(TokenBudget.of(self._model, 1), tokens=_ANY_LENGTH)

    def _run(self, batch: Batch, run: Callable[[], None]) -> ImaginedPass:
        tokens = counted_tokens(batch, self._whole.counts)
        with _Watch(self._model, self._places_of) as watch, self._chunks(), imagining(self._mode) as living:
            watch.living = living
            try:
                run()
            except Exception as error:  # of whatever kind: the model's own code, without numbers
                raise CapabilityError(
                    f"{type(self._model).__name__} cannot be run without numbers ({type(error).__name__}: "
                    f"{str(error).splitlines()[0] if str(error) else ''})"
                ) from error
            watch.end()
        moments, flops = watch.moments, living.flops
        if self._deepening is not None:
            per_layer = sum(one.flops for one in moments if self._in_layer(one, 2))
            flops += self._deepening.more * per_layer
            moments = self._deepening.moments(self._shallow, moments)
        peak = max(moment.peak for moment in moments)
        return ImaginedPass(tokens=tokens, peak=peak, moments=tuple(moments), flops=flops)

    def _chunks(self) -> contextlib.AbstractContextManager[None]:
        """The head's chunks are those of the device that is planned for; the tensors claim to be on a CPU."""
        device = self.config.device.partition(":")[0]
        return chunks_of(head_chunk(self.text.vocab_size, device))

    def _in_layer(self, moment: Moment, number: int) -> bool:
        return bool(moment.used) and layer_of(self._shallow[moment.used[0]].name) == number

    def _places_of(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(
            self._places[id(parameter)] for parameter in module._parameters.values() if parameter is not None
        )


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """Notes when modules with parameters of their own are called and left, and what lives meanwhile.

    Backward passes are seen by hooks of tensors: those of modules would keep what checkpointing frees.
    """

    def __init__(self, model: nn.Module, places_of: Callable[[nn.Module], tuple[int, ...]]) -> None:
        self.moments: list[Moment] = []
        self.living: Imagining | None = None
        self._last: tuple[tuple[int, ...], bool, bool] = ((), True, False)
        self._flops = 0
        self._handles: list[Any] = []
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        # What runs over tiles has all its parameters gathered at once, however many tiles there are.
        tiled = tiled_mlps(model)
        inside = {id(part) for module in tiled for part in module.modules()}
        for module in model.modules():
            if module in tiled:
                own = tuple(place for part in module.modules() for place in places_of(part))
                self._watch(module, own, ends_with_input=True)
            elif (places := places_of(module)) and module is not head and id(module) not in inside:
                frozen = not any(one.requires_grad for one in module._parameters.values() if one is not None)
                self._watch(module, places, ends_with_input=frozen)
        for place, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._given, place)))

    def _watch(self, module: nn.Module, places: tuple[int, ...], *, ends_with_input: bool) -> None:
        """Note calls of the module; its backward pass ends with its input's gradient, or with its parameters'."""

        def called(_: nn.Module, given: tuple[Any, ...]) -> None:
            self._note(places, True, False)
            if ends_with_input and given and isinstance(given[0], Tensor) and given[0].requires_grad:
                given[0].register_hook(lambda _: self._note(places, False, True))

        def left(_: nn.Module, given: Any, output: Any) -> None:
            self._note(places, False, False)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._note(places, True, True))

        self._handles += [module.register_forward_pre_hook(called), module.register_forward_hook(left)]

    def _given(self, place: int, parameter: Tensor) -> None:
        parameter.grad = None
        self._note((place,), False, True)

    def _note(self, places: tuple[int, ...], begins: bool, backward: bool) -> None:
        self.end()
        self._last = (places, begins, backward)

    def end(self) -> None:
        """Note what has been since the last moment."""
        if self.living is None:
            return
        used, begins, backward = self._last
        done, self._flops = self.living.flops - self._flops, self.living.flops
        self.moments.append(Moment(used=used, begins=begins, backward=backward, peak=self.living.peak, flops=done))
        self.living.begin_again()

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
