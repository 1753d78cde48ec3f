import pytest
from rlhf_core import ConfigError, GenerationRequest, SamplingConfig
from rlhf_rollout.backends.transformers.stop_strings import StopStrings
from tokenizers import Tokenizer, decoders, models


@pytest.fixture
def tokenizer():
    """Bytes and some pieces of several letters; 5 is a special token."""
    pieces = ["<a>", "b", "c", "ab", "cab", "<end>", "d", "<0xC3>", "<0xA9>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.add_special_tokens(["<end>"])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def ends(tokenizer, tokens, *stops, prompt=(6,), min_tokens=0):
    """How many tokens come until a string ends the sample; None if none does."""
    sampling = SamplingConfig(max_tokens=32, min_tokens=min_tokens, stop=stops)
    request = GenerationRequest(request_id="0", prompt_token_ids=prompt, sampling=sampling)
    strings = StopStrings(tokenizer, request)
    return next((count for count, token in enumerate(tokens, start=1) if strings.ended_by(token)), None)


def test_a_string_may_begin_and_end_within_tokens(tokenizer):
    # b c ab d
    assert ends(tokenizer, [1, 2, 3, 6], "ca") == 3
    assert ends(tokenizer, [1, 2, 3, 6], "bca") == 3
    assert ends(tokenizer, [1, 2, 3, 6], "bd") == 4
    assert ends(tokenizer, [1, 2, 3, 6], "dd") is None
    assert ends(tokenizer, [1, 2, 3, 6], "dd", "ab") == 3


def test_a_string_does_not_begin_in_the_prompt(tokenizer):
    assert ends(tokenizer, [2, 2], "bc", prompt=(1,)) is None


def test_special_tokens_are_no_text(tokenizer):
    assert ends(tokenizer, [1, 5, 2], "<end>") is None
    assert ends(tokenizer, [1, 5, 2], "bc") == 3


def test_a_letter_of_two_bytes_is_there_with_the_second(tokenizer):
    assert ends(tokenizer, [1, 7, 8, 6], "\u00e9") == 3


def test_what_the_first_tokens_complete_is_passed_over(tokenizer):
    # b c b c
    assert ends(tokenizer, [1, 2, 1, 2], "c", min_tokens=2) == 4
    assert ends(tokenizer, [1, 2, 1, 2], "cb", min_tokens=2) == 3  # begun before, completed after
    # A short string in the text that is kept for a longer one is not found again.
    assert ends(tokenizer, [1, 2, 6, 6], "c", "ddd", min_tokens=2) is None


def test_an_empty_string_is_refused():
    with pytest.raises(ConfigError, match="empty string"):
        SamplingConfig(max_tokens=1, stop=("",))
