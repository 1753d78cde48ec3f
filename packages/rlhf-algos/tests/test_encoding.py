from __future__ import annotations

import pytest
from rlhf_algos.data import Row
from rlhf_algos.encoding import Encoder, LengthLimit
from rlhf_algos.examples import collate_examples, encode_rows, fit
from rlhf_algos.method_rows import (
    preference_examples,
    split_pair,
    step_examples,
    supervised_examples,
    unpaired_examples,
)
from rlhf_core import ConfigError, DataError
from rlhf_core.testing.tiny import byte_tokenizer


@pytest.fixture
def encoder():
    return Encoder(byte_tokenizer())


def row(**values) -> Row:
    return Row(source="file.jsonl", number=7, values=values)


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def counted(encoder, tokens) -> str:
    ids = [t for t, m in zip(tokens.token_ids, tokens.response_mask, strict=True) if m]
    return encoder.tokenizer.decode(ids)


def whole(encoder, tokens) -> str:
    return encoder.tokenizer.decode(tokens.token_ids)


class TestText:
    def test_pairs_share_the_prompt_and_are_closed(self, encoder):
        (example,) = preference_examples(row(prompt="Hi ", chosen="good", rejected="bad"), encoder)
        chosen, rejected = example.rows
        assert whole(encoder, chosen) == "Hi good<|im_end|>"
        assert counted(encoder, chosen) == "good<|im_end|>"
        assert counted(encoder, rejected) == "bad<|im_end|>"
        assert chosen.token_ids[: chosen.prompt_length] == rejected.token_ids[: rejected.prompt_length]

    def test_a_closing_token_is_not_doubled(self, encoder):
        (example,) = supervised_examples(row(prompt="a", completion="b<|im_end|>"), encoder)
        assert whole(encoder, example.rows[0]) == "ab<|im_end|>"

    def test_an_implicit_prompt_is_what_both_have_in_common(self):
        assert split_pair(row(chosen="The sky is blue", rejected="The sky is green")) == (
            "The sky is",
            " blue",
            " green",
        )

    def test_the_prompt_template_surrounds_plain_prompts(self):
        encoder = Encoder(byte_tokenizer(), prompt_template="User: {}\nBot: ")
        (example,) = supervised_examples(row(prompt="x", completion="y"), encoder)
        assert whole(encoder, example.rows[0]) == "User: x\nBot: y<|im_end|>"
        with pytest.raises(ConfigError, match="prompt_template"):
            Encoder(byte_tokenizer(), prompt_template="no place")

    def test_text_counts_from_its_second_token(self, encoder):
        (example,) = supervised_examples(row(text="abc"), encoder)
        assert example.rows[0].response_mask == (False, True, True, True)


class TestConversations:
    def test_pairs(self, encoder):
        (example,) = preference_examples(
            row(prompt=user("q"), chosen=assistant("yes"), rejected=assistant("no")), encoder
        )
        assert whole(encoder, example.rows[0]).endswith("<|im_start|>assistant\nyes<|im_end|>\n")
        assert counted(encoder, example.rows[1]) == "no<|im_end|>\n"

    def test_implicit_prompt_and_a_plain_prompt_beside_it(self):
        pair = {"chosen": user("q") + assistant("y"), "rejected": user("q") + assistant("n")}
        expected = (user("q"), assistant("y"), assistant("n"))
        assert split_pair(row(**pair)) == expected
        assert split_pair(row(prompt="q", **pair)) == expected

    def test_all_assistant_turns_count_with_generation_marks(self, encoder):
        messages = user("a") + assistant("B") + user("c") + assistant("D")
        (example,) = supervised_examples(row(messages=messages), encoder)
        assert counted(encoder, example.rows[0]) == "B<|im_end|>D<|im_end|>"

    def test_and_without_marks(self):
        tokenizer = byte_tokenizer()
        template = tokenizer.chat_template
        for mark in ("{% generation %}", "{% endgeneration %}"):
            template = template.replace(mark, "")
        tokenizer.chat_template = template
        encoder = Encoder(tokenizer)
        messages = user("a") + assistant("B") + user("c") + assistant("D")
        (example,) = supervised_examples(row(messages=messages), encoder)
        assert counted(encoder, example.rows[0]) == "B<|im_end|>\nD<|im_end|>\n"

    def test_no_template_is_a_clear_error(self):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ConfigError, match="no chat template"):
            supervised_examples(row(messages=user("a") + assistant("b")), Encoder(tokenizer))


class TestKinds:
    def test_kto_takes_labels_or_pairs(self, encoder):
        (example,) = unpaired_examples(row(prompt="a", completion="b", label=False), encoder)
        assert example.columns["desirable"] == (0.0,)
        good, bad = unpaired_examples(row(prompt="a", chosen="b", rejected="c"), encoder)
        assert (good.columns["desirable"], bad.columns["desirable"]) == ((1.0,), (0.0,))
        assert counted(encoder, bad.rows[0]) == "c<|im_end|>"

    def test_margin_belongs_to_both_rows(self, encoder):
        (example,) = preference_examples(row(prompt="a", chosen="b", rejected="c", margin=2), encoder)
        assert example.columns["margin"] == (2.0, 2.0)

    def test_step_labels_stand_after_each_separator(self, encoder):
        (example,) = step_examples(row(prompt="p", completions=["x", "yz"], labels=[True, 0.25]), encoder)
        (tokens,), (labels,) = example.rows, example.token_columns["step_labels"]
        assert whole(encoder, tokens) == "px\nyz\n<|im_end|>"
        places = [i for i, m in enumerate(tokens.response_mask) if m]
        before = [encoder.tokenizer.decode([tokens.token_ids[i - 1]]) for i in places]
        assert before == ["\n", "\n"]
        assert [labels[i] for i in places] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("encode", "values", "parts"),
    [
        (preference_examples, {"prompt": "a", "chosen": "b"}, ["no column 'rejected'"]),
        (preference_examples, {"prompt": "a", "chosen": 3, "rejected": "b"}, ["'chosen'", "found int"]),
        (preference_examples, {"prompt": "a", "chosen": "b", "rejected": assistant("c")}, ["must both be text"]),
        (preference_examples, {"chosen": "same", "rejected": "same"}, ["do not differ"]),
        (preference_examples, {"prompt": [{"r": 1}], "chosen": "b", "rejected": "c"}, ["'role' and 'content'"]),
        (unpaired_examples, {"prompt": "a", "completion": "b", "label": "yes"}, ["label", "'yes'"]),
        (supervised_examples, {"question": "a"}, ["'messages'", "found 'question'"]),
        (supervised_examples, {"messages": user("a")}, ["no assistant turn"]),
        (step_examples, {"prompt": "a", "completions": ["x"], "labels": [1, 0]}, ["1 completions but 2 labels"]),
        (step_examples, {"prompt": "a", "completions": ["x"], "labels": [2]}, ["between 0 and 1"]),
    ],
)
def test_bad_rows_are_named(encoder, encode, values, parts):
    with pytest.raises(DataError) as caught:
        encode(row(**values), encoder)
    for part in ["file.jsonl row 7", *parts]:
        assert part in str(caught.value)


class TestLimits:
    @pytest.fixture
    def example(self, encoder):
        return preference_examples(row(prompt="12345", chosen="abcdef", rejected="x"), encoder)[0]

    def test_what_fits_is_left_alone(self, example):
        assert fit(example, LengthLimit(max_length=12)) is example

    def test_ends_are_cut(self, example, encoder):
        cut = fit(example, LengthLimit(max_length=8))
        assert [counted(encoder, tokens) for tokens in cut.rows] == ["abc", "x<|im_end|>"]

    def test_or_dropped_or_refused(self, example):
        assert fit(example, LengthLimit(max_length=8, long_rows="drop")) is None
        with pytest.raises(DataError, match=r"row 7: 12 tokens are more than max_length 8"):
            fit(example, LengthLimit(max_length=8, long_rows="error"))

    def test_prompts_without_room_for_an_answer(self, example, encoder):
        with pytest.raises(DataError, match=r"row 7: the prompt has 5 tokens"):
            fit(example, LengthLimit(max_length=5))
        assert fit(example, LengthLimit(max_length=5, long_prompts="drop")) is None
        kept = fit(example, LengthLimit(max_length=5, long_prompts="keep_end"))
        assert [whole(encoder, tokens) for tokens in kept.rows] == ["cdef<|im_end|>", "345x<|im_end|>"]
        assert not any(tokens.response_mask[0] for tokens in kept.rows)

    def test_the_report_counts(self, encoder):
        rows = [row(prompt="12", completion=text) for text in ("a", "abcdefgh")]
        rows.append(row(prompt="1234567890", completion="x"))
        limit = LengthLimit(max_length=6, long_prompts="drop")
        examples, report = encode_rows(rows, supervised_examples, encoder, limit)
        assert len(examples) == 2
        assert (report.rows, report.examples, report.truncated, report.dropped) == (3, 2, 1, 1)
        assert str(report) == "3 rows, 2 examples, 1 truncated, 1 dropped as too long"

    def test_nothing_left_is_an_error(self, encoder):
        with pytest.raises(DataError, match=r"all 1 rows of file\.jsonl were dropped"):
            encode_rows(
                [row(prompt="1234567890", completion="x")],
                supervised_examples,
                encoder,
                LengthLimit(max_length=4, long_prompts="drop"),
            )


def test_examples_become_units_of_a_batch(encoder):
    examples = [
        preference_examples(row(prompt="a", chosen="b", rejected="cde", margin=1.5), encoder)[0] for _ in range(2)
    ]
    batch = collate_examples(examples, pad_token_id=encoder.pad_token_id)
    assert (batch.rows, batch.units, batch.rows_per_unit) == (4, 2, 2)
    assert batch["margin"].tolist() == [1.5] * 4
    assert batch.lengths.tolist() == [3, 5, 3, 5]
    assert batch.sample_ids == ("file.jsonl row 7",) * 4
