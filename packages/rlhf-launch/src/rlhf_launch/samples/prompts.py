"""Prompts as token ids, and the endless, resumable stream of them that a run draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2
from rlhf_algos import (
    IMAGE_COLUMNS,
    DataSection,
    DataSource,
    EncodingOptions,
    ImagePrompt,
    LengthSection,
    ModelSection,
    Row,
    ShownImages,
    check_messages,
    epoch_order,
    load_tokenizer,
    mixing_weights,
    read_rows,
    with_system_prompt,
)
from rlhf_core import ConfigError, DataError, IntsLike, PackedInts

from rlhf_launch.config.run import MAX_PROMPT_TOKENS

_OWN = ("prompt", "messages")
"""Columns that are the prompt itself, and no metadata."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShownPrompt:
    """The images of a prompt, and how an engine that expands their places itself is asked about them."""

    images: ShownImages
    request_token_ids: PackedInts
    """One token for each image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, tokenised once."""

    prompt_id: str
    """Its row in the data."""
    text: str
    token_ids: PackedInts
    """Any sequence of numbers may be given."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns under the names that the reward function takes."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages that `text` is made of; empty for plain text."""
    source: Any = None
    """The prompt as the data has it, text or messages, where `text` is not the same."""
    shown: ShownPrompt | None = None
    """Its images, if it has any; `token_ids` then are as the model runs them, each image as long as it is."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            prompt_id: str,
            text: str,
            token_ids: IntsLike,
            metadata: Mapping[str, Any] = ...,
            messages: tuple[Mapping[str, Any], ...] = ...,
            source: Any = None,
            shown: ShownPrompt | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", PackedInts.of(self.token_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """How the rows of a dataset become prompts."""

    chat: bool = False
    """Wrap plain text as a user message and apply the tokenizer's chat template; messages always get it."""
    system_prompt: str | None = None
    """Put before the messages of every prompt that has no system message."""
    prompt_template: str | None = None
    """Text with `{}` in it, into which plain-text prompts are put."""
    lengths: LengthSection = field(default_factory=LengthSection)
    """Which prompts are too long, and what becomes of them."""
    image_urls: bool = False
    """Fetch images of which a row gives the URL."""
    processor: Any = None
    """Of a vision-language model, where prompts may have images."""

    @property
    def encoding(self) -> EncodingOptions:
        """The same as an encoder of rows has it."""
        return EncodingOptions(
            prompt_template=self.prompt_template,
            chat=self.chat,
            system_prompt=self.system_prompt,
            image_urls=self.image_urls,
        )

    @classmethod
    def of(cls, data: DataSection, lengths: LengthSection) -> PromptFormat:
        """As these sections of a configuration say."""
        return cls(
            chat=data.chat,
            system_prompt=data.system_prompt,
            prompt_template=data.prompt_template,
            lengths=lengths,
            image_urls=data.image_urls,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSets:
    """The prompts of several datasets."""

    prompts: Sequence[Prompt]
    """One dataset after the other."""
    sizes: tuple[int, ...]
    """Prompts of each dataset."""
    weights: tuple[float, ...]
    """How probable a draw from each is, relative to the others."""
    held_out: Sequence[Prompt] = ()
    dropped: int = 0
    """Prompts left out for their length."""


def policy_tokenizer(model: ModelSection) -> Any:
    """The tokenizer that the model section names.

    Raises:
        ConfigError: there is none that can be loaded, or it has no end of text.
    """
    where = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    trusted = model.trust_remote_code
    tokenizer = load_tokenizer(where, chat_template=model.chat_template, trust_remote_code=trusted, what=key)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}: the tokenizer of {where!r} has no end-of-text token; set `eos_token` in it")
    return tokenizer


def read_prompts(
    source: DataSource | str, tokenizer: Any, form: PromptFormat | None = None
) -> tuple[list[Prompt], int]:
    """The prompts of one dataset, and how many were dropped for their length.

    Args:
        source: where the rows are; a string is a path or a hub name. The column `prompt` has text or chat messages;
            without it `messages` are read up to the last user turn.
        tokenizer: the policy's.
        form: how rows become prompts.

    Raises:
        DataError: no such data, an empty or overlong prompt (with its row), chat messages without a chat template,
            or nothing left.
    """
    return make_prompts(read_rows(source), tokenizer, form)


def load_prompts(
    sources: Sequence[DataSource],
    tokenizer: Any,
    form: PromptFormat,
    *,
    hold_out: Callable[[int], int] | None = None,
    seed: int = 0,
) -> PromptSets:
    """Read and tokenise several datasets of prompts.

    Args:
        sources: the datasets; ids of prompts count on from one to the next.
        tokenizer: the policy's.
        form: how rows become prompts.
        hold_out: from the size of a dataset to the number of prompts held out of it; None holds out none.
        seed: which prompts are held out.

    Raises:
        DataError: see `read_prompts`.
        ConfigError: nothing would be left to train on.
    """
    kept: list[list[Prompt]] = []
    held_out: list[Prompt] = []
    dropped = numbered = 0
    for source in sources:
        rows = read_rows(source)
        prompts, too_long = make_prompts(rows, tokenizer, form, first_id=numbered)
        numbered += len(rows)
        dropped += too_long
        count = 0 if hold_out is None else hold_out(len(prompts))
        drawn = set(random.Random(f"{seed}/hold-out").sample(range(len(prompts)), count))
        held_out += [prompt for place, prompt in enumerate(prompts) if place in drawn]
        kept.append([prompt for place, prompt in enumerate(prompts) if place not in drawn])
    sizes = tuple(len(prompts) for prompts in kept)
    return PromptSets(
        prompts=[prompt for prompts in kept for prompt in prompts],
        sizes=sizes,
        weights=mixing_weights(sources, sizes),
        held_out=held_out,
        dropped=dropped,
    )


def make_prompts(
    rows: Sequence[Row], tokenizer: Any, form: PromptFormat | None = None, *, first_id: int = 0
) -> tuple[list[Prompt], int]:
    """Tokenise rows; see `read_prompts`. Ids count on from `first_id`."""
    form = form or PromptFormat()
    prompts, dropped = [], 0
    for index, row in enumerate(rows):
        found = _tokenise(row, tokenizer, form)
        fitted = form.lengths.fitted_prompt(found.token_ids, row.place, default=MAX_PROMPT_TOKENS)
        if fitted is None:
            dropped += 1
            continue
        if found.shown is not None and len(fitted) < len(found.token_ids):
            raise DataError(
                f"{row.place}: the prompt has {len(found.token_ids)} tokens with those of its images, more than "
                f"{len(fitted)}, and is not cut; raise lengths.max_prompt_tokens, or write "
                "lengths.long_prompts: drop"
            )
        given, left_out = _prompt_of(row), _OWN if found.shown is None else (*_OWN, *IMAGE_COLUMNS)
        prompts.append(
            Prompt(
                prompt_id=str(first_id + index),
                text=found.text,
                token_ids=tuple(fitted),
                metadata={name: value for name, value in row.values.items() if name not in left_out},
                messages=found.messages,
                source=None if given == found.text else given,
                shown=found.shown,
            )
        )
    if not prompts:
        most = form.lengths.max_prompt_tokens or MAX_PROMPT_TOKENS
        raise DataError(f"{rows[0].source}: all {dropped} prompts are longer than {most} tokens")
    return prompts, dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokenised:
    text: str
    token_ids: list[int]
    messages: tuple[Mapping[str, Any], ...] = ()
    shown: ShownPrompt | None = None


def _check_no_images(row: Row) -> None:
    """Refuse a prompt with images: it would be answered, and learnt from, without them."""
    for name in IMAGE_COLUMNS:
        if row.values.get(name) not in (None, "", [], ()):
            raise DataError(
                f"{row.place} has {name}, and prompts are given to this model, or by this command, as text; images "
                "are for `rlhf train` and offline training (sft, dpo, ...) of a vision-language model with its "
                f"processor's files; write columns: {{picture: {name}}} if they are for the reward alone"
            )


def _tokenise(row: Row, tokenizer: Any, form: PromptFormat) -> _Tokenised:
    value = _prompt_of(row)
    if isinstance(value, str):
        value = value if form.prompt_template is None else form.prompt_template.replace("{}", value)
    messages = [{"role": "user", "content": value}] if form.chat and isinstance(value, str) else value
    if isinstance(messages, list):
        _check_chat(row, messages, tokenizer)
        messages = with_system_prompt(messages, form.system_prompt)
    elif not isinstance(messages, str):
        raise DataError(
            f"{row.place}: the prompt must be text or a list of chat messages, found {type(value).__name__}"
        )
    said = () if isinstance(messages, str) else tuple(messages)
    if form.processor is None:
        _check_no_images(row)
    elif (found := ImagePrompt.of(row, _prompt_of(row), tokenizer, form.processor, form.encoding)) is not None:
        shown = ShownPrompt(images=found.images, request_token_ids=PackedInts.of(found.request_token_ids))
        return _Tokenised(text=found.text, token_ids=list(found.token_ids), messages=said, shown=shown)
    if isinstance(messages, str):
        if not messages.strip():
            raise DataError(f"{row.place}: the prompt is empty")
        token_ids = tokenizer(messages, add_special_tokens=True)["input_ids"]
        text = messages
    else:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{row.place}: the chat template cannot render messages of "
                f"{', '.join(m['role'] for m in messages)}: "
                f"{type(error).__name__}: {error}; mend the template, or give another one as model.chat_template"
            ) from error
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not token_ids:
        raise DataError(f"{row.place}: the tokenizer makes no tokens of the prompt {text[:40]!r}")
    return _Tokenised(text=text, token_ids=token_ids, messages=said)


def _prompt_of(row: Row) -> Any:
    """The column `prompt`, or `messages` up to the last user turn."""
    if "prompt" in row:
        return row["prompt"]
    messages = row.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{row.place} has no column 'prompt'; found {', '.join(map(repr, row.values)) or 'none'}. If it has "
            "another name, write columns: {prompt: its_name} beside the path"
        )
    if isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return messages


def _check_chat(row: Row, messages: list[Any], tokenizer: Any) -> None:
    if (problem := check_messages(messages)) is not None:
        raise DataError(f"{row.place}: {problem}")
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{row.place}: the prompt ends with the assistant's message, so there is nothing to answer; end it "
            "with "
            "a user's"
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{row.place}: the prompt is a list of chat messages, but the tokenizer has no chat template; use a "
            "chat model's tokenizer, set model.chat_template, or give plain text with data.chat=false"
        )


class PromptStream:
    """Passes over the prompts without end, each pass in an order of its own.

    The order depends on the seed and the pass alone, so the position is all that a checkpoint needs.

    >>> stream = PromptStream(["a", "b", "c"], seed=0, shuffle=False)
    >>> stream.take(4), stream.position
    (['a', 'b', 'c', 'a'], 4)
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        seed: int,
        shuffle: bool = True,
        position: int = 0,
        mixture: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:
        """`mixture`: sizes of the datasets that follow one another in `prompts`, and the weights of draws."""
        self._prompts = list(prompts)
        self._seed = seed
        self._mixture = mixture
        self._shuffle = shuffle
        self.position = position
        self._orders: dict[int, list[int]] = {}
        """Of the two passes that were asked for last: the prompts of a step may be of two."""

    @property
    def passes(self) -> float:
        """How often the prompts were gone through so far."""
        return self.position / len(self._prompts)

    def take(self, count: int) -> list[Any]:
        """The next `count` prompts."""
        taken = [self.at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def at(self, position: int) -> Any:
        """The prompt at a position, taken or not."""
        epoch, index = divmod(position, len(self._prompts))
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._ordered(epoch)
        return self._prompts[self._orders[epoch][index]]

    def note(self, position: int, scores: Sequence[float]) -> None:
        """Take what the samples of a position scored; this order does not depend on it."""

    def settle(self, positions: Iterable[int]) -> dict[str, float]:
        """End a step, in which these positions were used or given up; returns metrics, of which there are none."""
        return {}

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold beside the position: nothing."""
        return None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved state."""

    def _ordered(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle and self._mixture is not None:
            sizes, weights = self._mixture
            return epoch_order(sizes, weights, seed=self._seed, epoch=epoch)
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
