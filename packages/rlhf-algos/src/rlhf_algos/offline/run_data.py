"""The data of an offline run, read and encoded before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from rlhf_core import Batch, ConfigError, Ranks, TrainEngine, deal

from rlhf_algos.data.encoding import Encoder, EncodingOptions, TokenRow, load_encoder
from rlhf_algos.data.examples import EncodingReport, Example, collate_examples, encode_rows
from rlhf_algos.data.sources import DataSource, read_rows
from rlhf_algos.offline.config import OfflineConfig
from rlhf_algos.offline.engine_source import EngineFactory
from rlhf_algos.offline.methods import with_partners
from rlhf_algos.offline.order import epoch_order
from rlhf_algos.offline.reference import cache_key, default_cache, score_rows, with_reference
from rlhf_algos.offline.teacher import check_teacher, with_teacher
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_algos.torch_engine.model import check_model_path
from rlhf_algos.torch_engine.ranks import rank_of


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineData:
    """Encoded examples."""

    encoder: Encoder
    train: list[Example]
    sizes: tuple[int, ...]
    """Examples of each training dataset, in the order in which `train` holds them."""
    weights: tuple[float, ...]
    """Mixing weight of each; those of one dataset, or all left at 1, mean every example once per epoch."""
    eval: list[Example]
    reports: dict[str, EncodingReport]
    """What became of each dataset's rows, by path."""

    def order(self, config: OfflineConfig, epoch: int) -> list[int]:
        """Indices into `train` in the order of that epoch."""
        if not config.shuffle:
            return list(range(len(self.train)))
        return _kept_order(self.sizes, self.weights, config.seed, epoch)


@lru_cache(maxsize=2)
def _kept_order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> list[int]:
    """The order of an epoch is asked for in every step and made once."""
    return epoch_order(sizes, weights, seed=seed, epoch=epoch)


def load_data(config: OfflineConfig) -> OfflineData:
    """Check the model paths, then read and encode all rows.

    Raises:
        UserError: anything wrong with paths, tokenizer or rows.
    """
    check_model_path(config.model)
    if config.reference is not None:
        check_model_path(config.reference, what="reference")
    if config.offline_method.teacher(config.loss) is not None:
        check_teacher(config.loss, config.model)
    encoder = load_encoder(
        config.tokenizer or config.model,
        chat_template=config.chat_template,
        options=EncodingOptions(
            prompt_template=config.prompt_template,
            apply_chat_template=config.apply_chat_template,
            step_separator=config.step_separator,
            step_placeholder=config.step_placeholder,
            label_tokens=tuple(getattr(config.loss, "label_tokens", ())),
        ),
        trust_remote_code=config.run.trust_remote_code,
    )
    reports: dict[str, EncodingReport] = {}
    trained = [_encode(source, config, encoder, reports) for source in config.train]
    evaluated = [example for source in config.eval for example in _encode(source, config, encoder, reports)]
    if config.hold_out:
        for index, part in enumerate(trained):
            trained[index], held = _split(part, config.hold_out, seed=config.seed)
            evaluated += held
    train = [example for part in trained for example in part]
    sizes = tuple(len(part) for part in trained)
    mixed = len({source.weight for source in config.train}) > 1
    weights = tuple(s.weight for s in config.train) if mixed else tuple(float(size) for size in sizes)
    if config.offline_method.needs_partners(config.loss):
        if config.batch_size < 2:
            raise ConfigError("kto compares examples of a batch; write batch_size: 2 or more")
        train, evaluated = _partnered(train, config), _partnered(evaluated, config)
    return OfflineData(encoder=encoder, train=train, sizes=sizes, weights=weights, eval=evaluated, reports=reports)


def _encode(
    source: DataSource, config: OfflineConfig, encoder: Encoder, reports: dict[str, EncodingReport]
) -> list[Example]:
    rows = read_rows(source)
    examples, report = encode_rows(rows, config.offline_method.encode, encoder, config.limit)
    name = source.path if source.path not in reports else f"{source.path} ({len(reports) + 1})"
    reports[name] = report
    return examples


def _split(examples: list[Example], share: float, *, seed: int) -> tuple[list[Example], list[Example]]:
    """(rest, a drawn share of the examples); examples of one row of the data stay together."""
    names = list(dict.fromkeys(example.row_name for example in examples))
    count = max(1, round(share * len(names)))
    if count >= len(names):
        raise ConfigError(f"hold_out {share} of {len(names)} rows leaves nothing to train on; lower it")
    order = epoch_order([len(names)], [1.0], seed=seed, epoch=-2)
    held = {names[index] for index in order[:count]}
    return (
        [example for example in examples if example.row_name not in held],
        [example for example in examples if example.row_name in held],
    )


def _partnered(examples: list[Example], config: OfflineConfig) -> list[Example]:
    order = list(range(len(examples)))
    if config.shuffle:
        order = epoch_order([len(order)], [1.0], seed=config.seed, epoch=-1) if order else []
    return with_partners(examples, order, group=config.batch_size, max_length=config.limit.max_length)


def add_reference(data: OfflineData, config: OfflineConfig, ranks: Ranks, engines: EngineFactory) -> OfflineData:
    """Give all examples the reference's log-probs, from the cache or from the reference model."""
    model = config.reference or config.model
    everything = data.train + data.eval
    numbers = config.run.dtype
    if config.quantized_reference and config.run.lora is not None:
        numbers = f"{config.run.lora.quantize} {numbers}"
    scored = with_reference(
        everything,
        directory=config.reference_cache or default_cache(),
        key=cache_key(model, numbers, everything),
        open_engine=lambda: engines.open(config.engine(None)),
        ranks=ranks,
    )
    return replace(data, train=scored[: len(data.train)], eval=scored[len(data.train) :])


def add_teacher(data: OfflineData, config: OfflineConfig, ranks: Ranks) -> OfflineData:
    """Give all examples the teacher's most likely tokens, from the cache or from the teacher."""
    everything = data.train + data.eval
    scored = with_teacher(
        everything,
        config.loss,
        directory=config.reference_cache or default_cache(),
        dtype=config.run.dtype,
        open_engine=lambda: TorchEngine(config.engine(None, frozen=config.loss.teacher)),
        ranks=ranks,
    )
    return replace(data, train=scored[: len(data.train)], eval=scored[len(data.train) :])


def global_batch(
    examples: Sequence[Example], data: OfflineData, config: OfflineConfig, engine: TrainEngine, ranks: Ranks
) -> Batch:
    """The whole batch of a step with all its columns; the same on all ranks."""

    def scorer(rows: Sequence[TokenRow]) -> torch.Tensor:
        return score_rows(engine, rows, ranks)

    batch = collate_examples(examples, pad_token_id=data.encoder.pad_token_id)
    return config.offline_method.prepare(batch, examples, scorer, config.loss)


def own_units(batch: Batch, ranks: Ranks) -> list[int]:
    """This rank's units of a global batch, dealt out by length; may be empty."""
    return deal(batch.unit_lengths, ranks.size)[rank_of(ranks)]
