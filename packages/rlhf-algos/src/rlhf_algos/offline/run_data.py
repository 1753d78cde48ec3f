"""The data of an offline run, read and encoded before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from rlhf_core import Batch, ConfigError, DataError, Ranks, TrainEngine, check_model_path, deal

from rlhf_algos.config.sections import DataSection
from rlhf_algos.data.encoding import Encoder, EncodingOptions, TokenRow, load_encoder
from rlhf_algos.data.examples import EncodingReport, Example, collate_examples, encode_rows
from rlhf_algos.data.image_encoding import ShownImages
from rlhf_algos.data.sources import DataSource, mixing_weights, read_rows
from rlhf_algos.offline.config import OfflineConfig
from rlhf_algos.offline.engine_source import EngineFactory
from rlhf_algos.offline.methods import with_partners
from rlhf_algos.offline.order import epoch_order
from rlhf_algos.offline.reference import cache_key, default_cache, score_rows, with_reference
from rlhf_algos.offline.teacher import check_teacher, with_teacher
from rlhf_algos.torch_engine.engine import TorchEngine
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

    @property
    def shown(self) -> list[tuple[str, ShownImages]]:
        """The images of all rows that have some, and where these are."""
        examples = (*self.train, *self.eval)
        return [(one.name, row.images) for one in examples for row in one.rows if row.images is not None]

    @property
    def has_images(self) -> bool:
        """Whether a row has images."""
        return any(row.images is not None for one in (*self.train, *self.eval) for row in one.rows)

    def order(self, config: OfflineConfig, epoch: int) -> list[int]:
        """Indices into `train` in the order of that epoch."""
        if not config.data.shuffle:
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
    model, settings = config.model, config.data
    check_model_path(model.path, what="model.path")
    if model.reference is not None:
        check_model_path(model.reference, what="model.reference")
    if config.method.teacher(config.loss) is not None:
        check_teacher(config.loss, model.path, tokenizer=model.tokenizer, trust_remote_code=model.trust_remote_code)
    encoder = load_encoder(
        model.tokenizer or model.path,
        chat_template=model.chat_template,
        options=EncodingOptions(
            prompt_template=settings.prompt_template,
            chat=settings.chat,
            system_prompt=settings.system_prompt,
            step_separator=settings.step_separator,
            step_placeholder=settings.step_placeholder,
            label_tokens=tuple(getattr(config.loss, "label_tokens", ())),
            image_urls=settings.image_urls,
        ),
        trust_remote_code=model.trust_remote_code,
    )
    reports: dict[str, EncodingReport] = {}
    trained = [_encode(source, config, encoder, reports) for source in settings.train]
    sources = config.evaluation.data
    evaluated = [example for source in sources for example in _encode(source, config, encoder, reports)]
    if settings.hold_out:
        for index, part in enumerate(trained):
            trained[index], held = _split(part, settings, seed=config.seed)
            evaluated += held
    train = [example for part in trained for example in part]
    sizes = tuple(len(part) for part in trained)
    weights = mixing_weights(settings.train, sizes)
    if config.method.needs_partners(config.loss):
        if config.train.batch_size < 2:
            raise ConfigError("kto compares examples of a batch; write train.batch_size: 2 or more")
        train, evaluated = _partnered(train, config), _partnered(evaluated, config)
    data = OfflineData(encoder=encoder, train=train, sizes=sizes, weights=weights, eval=evaluated, reports=reports)
    _check_images(data, config)
    return data


def _check_images(data: OfflineData, config: OfflineConfig) -> None:
    """Refuse images that the model would not see, or that cannot run together, before a model is loaded."""
    if not (shown := data.shown):
        return
    if config.method.teacher(config.loss) is not None:
        raise ConfigError("a teacher is asked about text alone, and rows have images; leave the column out")
    config.engine(1_000_000, images=True)  # refuses what does not go with images
    place, first = shown[0]
    for other, images in shown:
        if images.layout != first.layout:
            raise DataError(
                f"{other}: its images do not fit those of {place}: the processor makes {images.layout} of them, "
                f"and {first.layout} there; resize them alike"
            )


def _encode(
    source: DataSource, config: OfflineConfig, encoder: Encoder, reports: dict[str, EncodingReport]
) -> list[Example]:
    rows = read_rows(source)
    examples, report = encode_rows(rows, config.method.encode, encoder, config.lengths)
    name = source.path if source.path not in reports else f"{source.path} ({len(reports) + 1})"
    reports[name] = report
    return examples


def _split(examples: list[Example], data: DataSection, *, seed: int) -> tuple[list[Example], list[Example]]:
    """(rest, what `data.hold_out` draws); examples of one row of the data stay together."""
    names = list(dict.fromkeys(example.row_name for example in examples))
    count = data.held_out_rows(len(names))
    order = epoch_order([len(names)], [1.0], seed=seed, epoch=-2)
    held = {names[index] for index in order[:count]}
    return (
        [example for example in examples if example.row_name not in held],
        [example for example in examples if example.row_name in held],
    )


def _partnered(examples: list[Example], config: OfflineConfig) -> list[Example]:
    order = list(range(len(examples)))
    if config.data.shuffle:
        order = epoch_order([len(order)], [1.0], seed=config.seed, epoch=-1) if order else []
    return with_partners(examples, order, group=config.train.batch_size, max_length=config.lengths.longest)


def add_reference(data: OfflineData, config: OfflineConfig, ranks: Ranks, engines: EngineFactory) -> OfflineData:
    """Give all examples the reference's log-probs, from the cache or from the reference model."""
    model = config.model.reference or config.model.path
    everything = data.train + data.eval
    engine = config.engine(None, images=data.has_images)
    numbers: str = engine.dtype
    if config.quantized_reference and config.model.lora is not None:
        numbers = f"{config.model.lora.quantize} {numbers}"
    scored = with_reference(
        everything,
        directory=config.reference_cache or default_cache(),
        key=cache_key(model, numbers, everything),
        open_engine=lambda: engines.start(engine),
        ranks=ranks,
    )
    return replace(data, train=scored[: len(data.train)], eval=scored[len(data.train) :])


def add_teacher(data: OfflineData, config: OfflineConfig, ranks: Ranks) -> OfflineData:
    """Give all examples the teacher's most likely tokens, from the cache or from the teacher."""
    everything = data.train + data.eval
    engine = config.engine(None, frozen=config.loss.teacher)
    scored = with_teacher(
        everything,
        config.loss,
        directory=config.reference_cache or default_cache(),
        dtype=engine.dtype,
        open_engine=lambda: TorchEngine(engine),
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
    return config.method.prepare(batch, examples, scorer, config.loss)


def own_units(batch: Batch, ranks: Ranks) -> list[int]:
    """This rank's units of a global batch, dealt out by length; may be empty."""
    return deal(batch.unit_lengths, ranks.size)[rank_of(ranks)]
