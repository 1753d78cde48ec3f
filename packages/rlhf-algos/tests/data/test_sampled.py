"""Rows of `rlhf generate`, and of what is chosen among them, as examples."""

import pytest
from rlhf_algos import METHODS, Encoder, Row
from rlhf_core import DataError
from rlhf_core.testing.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def sample(text, *, ends=True, **scores):
    tokens = [*ids(text), END] if ends else ids(text)
    return {"text": text, "token_ids": tokens, "log_probs": [-1.0] * len(tokens), **scores}


def row(*samples, **changes):
    values = {"prompt_id": "0", "prompt": "1+1=", "prompt_token_ids": ids("1+1="), "columns": {"answer": "2"}}
    return Row(source="samples.jsonl", number=4, values=values | {"samples": [*samples]} | changes)


def examples(method, made):
    return METHODS[method].encode(made, Encoder(TOKENIZER))


def test_one_sample_is_a_completion_with_the_tokens_that_were_sampled():
    (ended,) = examples("sft", row(sample("2")))
    assert ended.rows[0].token_ids == (*ids("1+1=2"), END)
    assert ended.rows[0].response_mask == (False,) * 4 + (True, True)
    # One that was cut off is not taught to end there.
    (cut,) = examples("sft", row(sample("222", ends=False)))
    assert cut.rows[0].token_ids == tuple(ids("1+1=222"))


def test_several_samples_are_no_completion():
    with pytest.raises(DataError, match=r"samples\.jsonl row 4 has 3 samples.*rlhf select best_of_n"):
        examples("sft", row(sample("1"), sample("2"), sample("3")))


@pytest.mark.parametrize("method", ["dpo", "rm"])
def test_two_scored_samples_are_a_pair(method):
    (pair,) = examples(method, row(sample("1", score=0.0), sample("2", score=1.0)))
    assert [each.token_ids[4:] for each in pair.rows] == [(*ids("2"), END), (*ids("1"), END)]
    assert examples(method, row(sample("1", score=1.0), sample("2", score=1.0))) == []
    assert examples(method, row(sample("1", score=None), sample("2", score=1.0))) == []
    with pytest.raises(DataError, match="has 3 samples of its prompt, and a pair needs two"):
        examples(method, row(*(sample("1", score=0.0),) * 3))
    with pytest.raises(DataError, match=r"samples without scores.*rlhf score"):
        examples(method, row(sample("1"), sample("2")))


def test_kto_takes_a_pair_as_one_good_and_one_bad_answer():
    made = examples("kto", row(sample("1", score=0.0), sample("2", score=1.0)))
    assert [(e.rows[0].token_ids[4], e.columns["desirable"]) for e in made] == [
        (ids("2")[0], (1.0,)),
        (ids("1")[0], (0.0,)),
    ]


def test_samples_without_log_probs_are_read_as_text():
    scored = sample("2", ends=False)
    (made,) = examples("sft", row(scored | {"log_probs": None}))
    assert made.rows[0].token_ids == (*ids("1+1=2"), END)


def chosen(**changes):
    values = {
        "prompt": "1+1=",
        "completion": "2",
        "prompt_token_ids": ids("1+1="),
        "completion_token_ids": ids("2"),
        "score": 1.0,
    }
    return Row(source="chosen.jsonl", number=2, values=values | changes)


def test_chosen_tokens_count_and_not_their_text():
    (made,) = examples("sft", chosen())
    assert made.rows[0].token_ids == tuple(ids("1+1=2"))
    text_alone = {name: value for name, value in chosen().values.items() if name in ("prompt", "completion")}
    (made,) = examples("sft", Row(source="chosen.jsonl", number=2, values=text_alone))
    assert made.rows[0].token_ids == (*ids("1+1=2"), END)
    (labelled,) = examples("kto", chosen(label=True))
    assert labelled.rows[0].token_ids == tuple(ids("1+1=2"))


def test_tokens_of_a_conversation_are_compared_with_its_message():
    (made,) = examples("sft", chosen(prompt=[{"role": "user", "content": "1+1="}],
                                     completion=[{"role": "assistant", "content": "2"}]))  # fmt: skip
    assert made.rows[0].token_ids == tuple(ids("1+1=2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"completion_token_ids": ids("3")},
            r"row 2: completion_token_ids are not tokens of this model's tokenizer",
        ),
        ({"completion_token_ids": []}, "must be a list of token ids"),
        ({"prompt_token_ids": "1+1="}, "must be a list of token ids"),
        ({"prompt_token_ids": [1.5]}, "must be a list of token ids"),
    ],
)
def test_wrong_tokens_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        examples("sft", chosen(**changes))
