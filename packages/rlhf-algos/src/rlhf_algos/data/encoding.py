"""Text and conversations as token ids with a mask of the tokens that count: TRL's conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from rlhf_core import ConfigError, DataError, has_vision_class, load_processor

from rlhf_algos.data.conversations import check_messages, with_system_prompt

if TYPE_CHECKING:
    from rlhf_algos.data.image_encoding import ShownImages

Messages = list[dict[str, Any]]
Text = str | Messages
"""Plain text, or a conversation `[{role: user, content: ...}, ...]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One sequence. `response_mask` is True where a token counts for the loss."""

    token_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    images: ShownImages | None = None
    """What the model is shown with the tokens."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first counted one."""
        return self.response_mask.index(True) if True in self.response_mask else len(self.token_ids)


def is_conversation(value: object) -> bool:
    """True for a list of messages with roles."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def problem_of_text(value: object) -> str | None:
    """What keeps a value from being text or a conversation; None if nothing does."""
    if isinstance(value, str):
        return None
    if not isinstance(value, Sequence) or not value:
        return f"found {type(value).__name__} {str(value)[:40]!r}, expected text or a list of messages"
    return check_messages(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingOptions:
    """What an `Encoder` does beside tokenising."""

    prompt_template: str | None = None
    """Text with `{}` in it, into which plain-text prompts are put."""
    chat: bool = False
    """Take plain-text prompts and answers as messages of a user and an assistant."""
    system_prompt: str | None = None
    """Put before the messages of a conversation that has no system message."""
    step_separator: str = "\n"
    """Closes each step that stands in a text of its own."""
    step_placeholder: str | None = None
    """The token that ends each step where all steps stand in one text."""
    label_tokens: tuple[str, ...] = ()
    """Tokens that call a step right and wrong; empty for a scalar head."""
    image_urls: bool = False
    """Fetch images of which a row gives the URL."""

    def __post_init__(self) -> None:
        if self.prompt_template is not None and "{}" not in self.prompt_template:
            raise ConfigError(
                f"data.prompt_template {self.prompt_template!r} has no '{{}}' for the prompt to stand in"
            )


class Encoder:
    """A tokenizer with our conventions for end of text, prompts and chat templates."""

    def __init__(self, tokenizer: Any, options: EncodingOptions | None = None, *, processor: Any = None) -> None:
        options = options or EncodingOptions()
        self.tokenizer = tokenizer
        self.options = options
        self.processor = processor
        """Of a vision-language model; None for one of text."""
        self.label_token_ids = [self._token(text, "algorithm.label_tokens") for text in options.label_tokens]
        """Of a right and of a wrong step, for process reward models with a language-model head; else empty."""

    def placeholder_id(self, place: str) -> int:
        """The token that ends each step of a text."""
        if self.options.step_placeholder is None:
            raise DataError(
                f"{place}: its steps are marked inside 'input'; say by which token, with data.step_placeholder: "
                "<token>"
            )
        return self._token(self.options.step_placeholder, "data.step_placeholder")

    def label_value(self, label: object, place: str) -> float:
        """1 for the token of a right step, 0 for that of a wrong one."""
        if label not in self.options.label_tokens:
            known = " or ".join(map(repr, self.options.label_tokens)) or "a number"
            raise DataError(
                f"{place}: label {label!r} is not {known}; name the tokens of right and wrong steps with "
                "algorithm.label_tokens: [right, wrong]"
            )
        return float(label == self.options.label_tokens[0])

    def _token(self, text: str, option: str) -> int:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(
                f"{option}: {text!r} is {len(ids)} tokens of this tokenizer; give a text of one token"
            )
        return ids[0]

    @property
    def pad_token_id(self) -> int:
        """Fills the right side of a batch; masked everywhere."""
        return next((t for t in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if t is not None), 0)

    def prompt(self, prompt: Text) -> list[int]:
        """Token ids up to where the answer starts."""
        prompt = self._as_messages(prompt, "user")
        if isinstance(prompt, str):
            return self._text(self._fill(prompt))
        return self._chat(prompt, add_generation_prompt=True)

    def _as_messages(self, text: Text, role: str) -> Text:
        if not self.options.chat or not isinstance(text, str):
            return text
        return [{"role": role, "content": self._fill(text) if role == "user" else text}]

    @property
    def end_token_id(self) -> int:
        """End of text; the padding token where the tokenizer has none."""
        end = self.tokenizer.eos_token_id
        return self.pad_token_id if end is None else end

    def step(self, text: str) -> list[int]:
        """One step of a reasoning and its separator, at whose last token the value is read."""
        return [
            token
            for part in (text, self.options.step_separator)
            for token in self.tokenizer(part, add_special_tokens=False)["input_ids"]
        ]

    def answers(self, prompt: Text, answers: Sequence[Text], place: str) -> list[TokenRow]:
        """`prompt` followed by each of `answers`; the answer's tokens count.

        Each whole text is tokenised at once. The answers start where the tokens of any of them leave those of
        the prompt alone, so all rows share the same prompt tokens. Plain text is closed by the end-of-text token.

        Raises:
            DataError: prompt and answers are not both text or both conversations, or an answer is empty.
        """
        prompt = self._as_messages(prompt, "user")
        answers = [self._as_messages(answer, "assistant") for answer in answers]
        kinds = {isinstance(text, str) for text in (prompt, *answers)}
        if len(kinds) > 1:
            raise DataError(f"{place}: prompt and answers must both be text or both be lists of messages")
        alone = self.prompt(prompt)
        whole = [self._whole(prompt, answer) for answer in answers]
        start = min(_common_prefix(alone, tokens) for tokens in whole)
        if start == 0:
            # Nothing is predicted for the first token of a sequence.
            start = 1
        for tokens in whole:
            if len(tokens) <= start:
                raise DataError(f"{place}: an answer is empty after tokenisation; give at least one token")
        return [
            TokenRow(
                token_ids=tuple(tokens),
                response_mask=tuple(position >= start for position in range(len(tokens))),
            )
            for tokens in whole
        ]

    def whole_text(self, text: str) -> TokenRow:
        """Every token but the first counts; closed by the end-of-text token."""
        tokens = self._text(self._closed(text))
        return TokenRow(token_ids=tuple(tokens), response_mask=tuple(index > 0 for index in range(len(tokens))))

    def conversation(self, messages: Messages, place: str) -> TokenRow:
        """A whole conversation in which the assistant's turns count.

        Uses the template's generation marks if it has them, else the growth of the rendered conversation from
        turn to turn.

        Raises:
            DataError: no assistant turn, or a template without marks that does not render turn after turn.
        """
        if "{% generation" in self._chat_template() or "{%- generation" in self._chat_template():
            marked = self._rendered(messages, return_assistant_tokens_mask=True)
            tokens, mask = list(marked["input_ids"]), [bool(m) for m in marked["assistant_masks"]]
        else:
            tokens, mask = self._grown(messages, place)
        if mask:
            mask[0] = False
        if not any(mask):
            raise DataError(f"{place}: the conversation has no assistant turn to learn from")
        return TokenRow(token_ids=tuple(tokens), response_mask=tuple(mask))

    def _grown(self, messages: Messages, place: str) -> tuple[list[int], list[bool]]:
        tokens = self._chat(messages)
        mask = [False] * len(tokens)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._chat(messages[:index], add_generation_prompt=True) if index else []
            upto = self._chat(messages[: index + 1])
            if tokens[: len(upto)] != upto or upto[: len(before)] != before:
                raise DataError(
                    f"{place}: the chat template changes earlier turns as the conversation grows, so the "
                    "assistant's tokens cannot be told; put {% generation %} marks into the template"
                )
            mask[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return tokens, mask

    def _whole(self, prompt: Text, answer: Text) -> list[int]:
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._text(self._closed(self._fill(prompt) + answer))
        return self._chat([*prompt, *answer])  # type: ignore[list-item]

    def _fill(self, prompt: str) -> str:
        template = self.options.prompt_template
        return prompt if template is None else template.replace("{}", prompt)

    def _closed(self, text: str) -> str:
        end = self.tokenizer.eos_token or ""
        return text if end and text.endswith(end) else text + end

    def _text(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _chat_template(self) -> str:
        template = self.tokenizer.chat_template
        if not template:
            raise ConfigError(
                "the rows are conversations but the tokenizer has no chat template; give a chat model's tokenizer, "
                "set model.chat_template to a Jinja file, or use rows of plain text with data.chat: false"
            )
        return template if isinstance(template, str) else str(template)

    def _chat(self, messages: Messages, **arguments: Any) -> list[int]:
        return list(self._rendered(messages, **arguments)["input_ids"])

    def _rendered(self, messages: Messages, **arguments: Any) -> Any:
        self._chat_template()
        messages = with_system_prompt(messages, self.options.system_prompt)
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **arguments)
        except jinja2.TemplateError as error:
            raise self.template_error(messages, error) from error

    @staticmethod
    def template_error(messages: Messages, error: Exception) -> ConfigError:
        """That the chat template cannot render a conversation."""
        return ConfigError(
            f"the chat template cannot render a conversation of {', '.join(m['role'] for m in messages)}: "
            f"{type(error).__name__}: {error}; mend the template, or give another one as model.chat_template"
        )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def load_encoder(
    model: str,
    *,
    chat_template: str | None = None,
    options: EncodingOptions | None = None,
    trust_remote_code: bool = False,
) -> Encoder:
    """The tokenizer of a model directory or hub name.

    `chat_template` is the path of a Jinja file that replaces the tokenizer's own.

    Raises:
        ConfigError: there is no tokenizer.
    """
    tokenizer = load_tokenizer(model, chat_template=chat_template, trust_remote_code=trust_remote_code)
    return Encoder(
        tokenizer, options, processor=processor_of(model, tokenizer, trust_remote_code=trust_remote_code)
    )


def processor_of(model: str, tokenizer: Any, *, trust_remote_code: bool = False) -> Any:
    """The processor of a vision-language model, with this tokenizer and its chat template; else None."""
    from transformers import AutoConfig

    try:
        its = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        processor = load_processor(model, trust_remote_code=trust_remote_code) if has_vision_class(its) else None
    except (OSError, ValueError, KeyError, ConfigError):
        return None  # a tokenizer alone; rows with images are refused
    if processor is None:
        return None
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    return processor


def load_tokenizer(
    model: str, *, chat_template: str | None = None, trust_remote_code: bool = False, what: str = "model.path"
) -> Any:
    """The tokenizer of a model directory or hub name, tried on a word.

    Args:
        model: where it is.
        chat_template: path of a Jinja file that replaces the tokenizer's own.
        trust_remote_code: run code that comes with it.
        what: the key of the configuration, for messages.

    Raises:
        ConfigError: there is none that can be loaded, or it gives no tokens for text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file ends in any of a dozen errors
        raise ConfigError(
            f"{what}: no tokenizer can be loaded from {model!r}: {_first_line(error)}; give a model with its "
            "tokenizer's files, or say model.tokenizer"
        ) from error
    # A small alphabet need not have letters; a tokenizer without files has tokens for nothing.
    if not any(tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a word", "1 + 2")):
        raise ConfigError(
            f"{what}: the tokenizer in {model!r} makes no tokens of text, so its files are missing or empty; copy "
            "tokenizer.json and tokenizer_config.json beside the model, or say model.tokenizer"
        )
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise ConfigError(f"model.chat_template: file {chat_template!r} does not exist")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
