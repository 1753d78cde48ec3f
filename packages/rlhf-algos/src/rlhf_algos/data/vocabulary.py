"""Whether a teacher reads the tokens of a student as the student means them."""

from __future__ import annotations

from rlhf_core import ConfigError, check_model_path

_PROBE = "The answer is 42: 6 * 7.\n"


def check_same_vocabulary(
    teacher: str,
    student: str,
    *,
    key: str,
    tokenizer: str | None = None,
    larger: bool = False,
    trust_remote_code: bool = False,
) -> int:
    """Refuse a teacher with another vocabulary, before any weights are loaded; returns the size of the teacher's.

    Args:
        teacher: path or hub name.
        student: path or hub name.
        key: of the configuration, which names the teacher.
        tokenizer: of the student, if it is not in its directory.
        larger: whether the teacher may have more tokens than the student: rows at the end of its embedding, which
            models of one family are padded with differently.
        trust_remote_code: whether a directory may bring code for its tokenizer.

    Raises:
        ConfigError: it cannot be found, or its vocabulary has another size or other tokens.
    """
    from transformers import AutoConfig

    check_model_path(teacher, what=key)
    try:
        configs = [
            AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code) for name in (teacher, student)
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} {teacher!r} or model.path {student!r} cannot be loaded: "
            f"{str(error).splitlines()[0]} Give a directory that is there, or a hub name that can be reached"
        ) from error
    its, own = (one.get_text_config().vocab_size for one in configs)
    if its < own or (its > own and not larger):
        raise ConfigError(
            f"the teacher's vocabulary has {its} tokens, the student's {own}; distillation compares "
            "token by token, so take a teacher of the same family"
        )
    if other := _other_token(teacher, tokenizer or student, trust_remote_code=trust_remote_code):
        raise ConfigError(
            f"the teacher's vocabulary is another than the student's: {other}; distillation compares token by "
            "token, so take a teacher of the same family"
        )
    return its


def _other_token(teacher: str, student: str, *, trust_remote_code: bool) -> str:
    """What the two tokenizers differ in, in words; empty if in nothing, or the teacher came without one.

    Ids that only one of them uses (special tokens that were added) do no harm.
    """
    from transformers import AutoTokenizer

    try:
        its, own = (
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code) for name in (teacher, student)
        )
    except (OSError, ValueError):
        return ""
    its_tokens = {index: token for token, index in its.get_vocab().items()}
    for token, index in own.get_vocab().items():
        if its_tokens.get(index, token) != token:
            return f"id {index} is {token!r} for the student and {its_tokens[index]!r} for the teacher"
    cut = [tokenizer(_PROBE, add_special_tokens=False)["input_ids"] for tokenizer in (own, its)]
    return "" if cut[0] == cut[1] else f"{_PROBE!r} is {cut[0]} for the student and {cut[1]} for the teacher"
