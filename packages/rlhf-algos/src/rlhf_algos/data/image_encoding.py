"""Rows with images as token ids, by the model's own processor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from rlhf_core import CapabilityError, DataError, RowImages, image_row

from rlhf_algos.data.conversations import with_system_prompt
from rlhf_algos.data.encoding import Encoder, EncodingOptions, Messages, Text, TokenRow
from rlhf_algos.data.images import StoredImage, row_images
from rlhf_algos.data.sources import Row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShownImages:
    """The images of a row, of which the processor's tensors are made when the row's batch is.

    Tensors of all rows of a dataset would not fit into memory; these are the images as they are stored.
    """

    images: tuple[StoredImage, ...]
    processor: Any
    token_ids: tuple[int, ...]
    """Tokens that stand for images."""
    layout: tuple[object, ...]
    """See RowImages."""

    def load(self) -> RowImages:
        """What the model is given.

        Raises:
            DataError: an image has changed since the data was read.
        """
        marks = self.processor.image_token * len(self.images)
        return image_row(self.processor, marks, self.open())[1]

    def open(self) -> list[Any]:
        """The images themselves, of PIL.

        Raises:
            DataError: an image has changed since the data was read.
        """
        return [image.open() for image in self.images]

    @property
    def digest(self) -> str:
        """Of the images and of what the processor does with them."""
        made = hashlib.sha256(self.processor.image_processor.to_json_string().encode())
        for image in self.images:
            made.update(image.digest.encode())
        return made.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with images, for a model that is to answer it."""

    text: str
    """With the processor's token for an image once for each."""
    token_ids: tuple[int, ...]
    """As the model runs them: each image has as many as it takes."""
    request_token_ids: tuple[int, ...]
    """As an engine that expands the places of images itself is given them: one for each image."""
    images: ShownImages

    @classmethod
    def of(
        cls, row: Row, prompt: Text, tokenizer: Any, processor: Any, options: EncodingOptions
    ) -> ImagePrompt | None:
        """The prompt of a row; None if the row has no images.

        Args:
            row: of a dataset.
            prompt: its prompt, text or messages.
            tokenizer: the model's.
            processor: the model's, see `processor_of`; None if it has none.
            options: how prompts are put together, and whether images are fetched.

        Raises:
            DataError: an image that cannot be had, another number of places for images in the text, or images for
                a model that takes none.
        """
        encoder = encoder_of(row, Encoder(tokenizer, options, processor=processor))
        return encoder.image_prompt(prompt) if isinstance(encoder, RowEncoder) else None


def encoder_of(row: Row, encoder: Encoder) -> Encoder:
    """What encodes a row: the encoder itself, or for a row with images one that knows these.

    Raises:
        DataError: an image that cannot be had, or images for a model that takes none.
    """
    images = row_images(row, urls=encoder.options.image_urls)
    if not images:
        return encoder
    if encoder.processor is None:
        raise DataError(
            f"{row.place} has images, and the model has no processor that takes any; give a vision-language model "
            "with its processor's files, or write only: [...] beside the data's path without the column"
        )
    return RowEncoder(encoder, encoder.processor, images, row.place)


class RowEncoder(Encoder):
    """The encoder of one row that has images: the processor expands their places in every text it is given."""

    def __init__(self, base: Encoder, processor: Any, images: Sequence[StoredImage], place: str) -> None:
        super().__init__(base.tokenizer, base.options)
        self.processor, self._place = processor, place
        self._stored = tuple(images)
        self._opened = [image.open() for image in images]
        self._shown: ShownImages | None = None
        self._places = 0

    def answers(self, prompt: Text, answers: Sequence[Text], place: str) -> list[TokenRow]:
        """See Encoder; tokens of images never count."""
        rows = super().answers(prompt, answers, place)
        return [self._with_images(row) for row in rows]

    def conversation(self, messages: Messages, place: str) -> TokenRow:
        """See Encoder."""
        return self._with_images(super().conversation(messages, place))

    def whole_text(self, text: str) -> TokenRow:
        """See Encoder."""
        return self._with_images(super().whole_text(text))

    def image_prompt(self, prompt: Text) -> ImagePrompt:
        """The prompt up to where the answer starts.

        Raises:
            DataError: another number of places for images in the text than there are images.
        """
        prompt = self._as_messages(prompt, "user")
        plain = isinstance(prompt, str)
        if isinstance(prompt, str):
            text = self._fill(prompt)
        else:
            messages = with_system_prompt(prompt, self.options.system_prompt)
            text, _ = self._render(messages, False, add_generation_prompt=True)
        tokens = tuple(self._tokens(text, add_special_tokens=plain))
        return ImagePrompt(
            text=text,
            token_ids=tokens,
            request_token_ids=tuple(self.tokenizer(text, add_special_tokens=plain)["input_ids"]),
            images=self._all_shown(tokens),
        )

    def _all_shown(self, token_ids: Sequence[int]) -> ShownImages:
        # The places of all images were expanded in some text of the row; whether in this one, its tokens say.
        shown = self._shown
        if shown is None or sum(token in shown.token_ids for token in token_ids) != self._places:
            raise DataError(
                f"{self._place}: {len(self._stored)} image(s), and not as many places for them in the text; put "
                f'{{"type": "image"}} into the content of a message for each, or '
                f"{self.processor.image_token!r} into plain text; every answer of a pair sees all images"
            )
        return shown

    def _with_images(self, row: TokenRow) -> TokenRow:
        shown = self._all_shown(row.token_ids)
        counts = zip(row.token_ids, row.response_mask, strict=True)
        mask = tuple(counted and token not in shown.token_ids for token, counted in counts)
        if not any(mask):
            raise DataError(f"{self._place}: nothing but images is left to learn from")
        return replace(row, response_mask=mask, images=shown)

    # ------------------------------------------------------------ in place of the tokenizer

    def _text(self, text: str) -> list[int]:
        return self._tokens(text, add_special_tokens=True)

    def _rendered(self, messages: Messages, **arguments: Any) -> Any:
        marked = bool(arguments.pop("return_assistant_tokens_mask", False))
        text, spans = self._render(with_system_prompt(messages, self.options.system_prompt), marked, **arguments)
        tokens = self._tokens(text)
        mask = [0] * len(tokens)
        for start, stop in spans:
            before, upto = self._tokens(text[:start]), self._tokens(text[:stop])
            if tokens[: len(upto)] != upto or upto[: len(before)] != before:
                raise DataError(f"{self._place}: an assistant's turn does not begin and end between tokens")
            mask[len(before) : len(upto)] = [1] * (len(upto) - len(before))
        return {"input_ids": tokens, "assistant_masks": mask}

    def _render(self, messages: Messages, marked: bool, **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where its template marks the assistant's turns."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[[_in_parts(message, self._place) for message in messages]],
                chat_template=self._chat_template(),
                return_assistant_tokens_mask=marked,
                **self.tokenizer.special_tokens_map,
                **arguments,
            )
        except jinja2.TemplateError as error:
            raise self.template_error(messages, error) from error
        texts, spans = rendered
        return texts[0], list(spans[0]) if marked else []

    def _tokens(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        count = text.count(self.processor.image_token)
        if count > len(self._stored):
            raise DataError(
                f"{self._place}: the text has {count} places for images, the row has {len(self._stored)} image(s)"
            )
        if not count:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        try:
            tokens, seen = image_row(
                self.processor, text, self._opened[:count], add_special_tokens=add_special_tokens
            )
        except (CapabilityError, ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"{self._place}: {type(self.processor).__name__} cannot take the row: "
                f"{type(error).__name__}: {str(error)[:300]}"
            ) from error
        if count == len(self._stored) and self._shown is None:
            self._shown = ShownImages(
                images=self._stored, processor=self.processor, token_ids=seen.token_ids, layout=seen.layout
            )
            self._places = sum(token in seen.token_ids for token in tokens)
        return tokens


def _in_parts(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A message whose content is a list of parts, as every template of a vision-language model takes it."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not isinstance(content, Sequence):
        return message
    parts: list[dict[str, Any]] = []
    for part in content:
        # Columns of structs have all keys in all parts.
        given = {name: value for name, value in part.items() if value is not None}
        if given.get("type") == "image" and len(given) > 1:
            raise DataError(
                f"{place}: an image stands in the message itself ({', '.join(sorted(given))}); write "
                '{"type": "image"} there, and the image into the column images'
            )
        if given.get("type") not in ("image", "text"):
            raise DataError(
                f"{place}: a part of a message is of type {given.get('type')!r}; text and image are known"
            )
        parts.append(given)
    return {**message, "content": parts}
