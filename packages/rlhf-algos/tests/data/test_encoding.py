from __future__ import annotations

import pytest
from rlhf_algos.data.encoding import Encoder, EncodingOptions
from rlhf_algos.data.examples import collate_examples, encode_rows, fit
from rlhf_algos.data.lengths import LengthSection
from rlhf_algos.data.readers import (
    preference_examples,
    split_pair,
    step_examples,
    supervised_examples,
    triple_examples,
    unpaired_examples,
)
from rlhf_algos.data.sources import Row
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
        encoder = Encoder(byte_tokenizer(), EncodingOptions(prompt_template="User: {}\nBot: "))
        (example,) = supervised_examples(row(prompt="x", completion="y"), encoder)
        assert whole(encoder, example.rows[0]) == "User: x\nBot: y<|im_end|>"
        with pytest.raises(ConfigError, match="prompt_template"):
            EncodingOptions(prompt_template="no place")

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

    def test_triples_have_the_gold_answer_last(self, encoder):
        values = {"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d"}
        (example,) = triple_examples(row(**values), encoder)
        assert [counted(encoder, tokens) for tokens in example.rows] == [f"{x}<|im_end|>" for x in "bcd"]
        (shared,) = triple_examples(row(chosen="ab", rejected="ac", reference="ad"), encoder)
        assert [counted(encoder, tokens) for tokens in shared.rows] == [f"{x}<|im_end|>" for x in "bcd"]

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
        (triple_examples, {"prompt": "a", "chosen": "b", "rejected": "c"}, ["no column 'reference'"]),
        (triple_examples, {"chosen": "ab", "rejected": "ac", "reference": "b"}, ["does not begin with the prompt"]),
        (
            triple_examples,
            {"prompt": "a", "chosen": "b", "rejected": "c", "reference": assistant("d")},
            ["must all be text"],
        ),
        (preference_examples, {"chosen": "same", "rejected": "same and more"}, ["do not differ"]),
        (preference_examples, {"prompt": [{"r": 1}], "chosen": "b", "rejected": "c"}, ["'role' and 'content'"]),
        (unpaired_examples, {"prompt": "a", "completion": "b", "label": "yes"}, ["label", "'yes'"]),
        (supervised_examples, {"question": "a"}, ["'messages'", "found 'question'"]),
        (supervised_examples, {"messages": user("a")}, ["no assistant turn"]),
        (step_examples, {"prompt": "a", "completions": ["x"], "labels": [1, 0]}, ["1 completions but 2 labels"]),
        (step_examples, {"prompt": "a", "completions": ["x"], "labels": [2]}, ["between 0 and 1"]),
        (step_examples, {"input": "a", "label": [1]}, ["step_placeholder"]),
        (
            supervised_examples,
            {"messages": user("a"), "prompt": "a", "completion": "b"},
            ["read in 2 ways", "only: [messages] or only: [prompt, completion]"],
        ),
        (supervised_examples, {"instruction": "a", "input": "b", "output": "c"}, ["prompt: instruction"]),
        (supervised_examples, {"input": "a"}, ["'input' and 'output'", "found 'input'"]),
        (preference_examples, {"prompt": "a", "input": "b", "chosen": "c", "rejected": "d"}, ["has both", "only"]),
        (unpaired_examples, {"output": user("a"), "label": 1}, ["ends with the assistant's answer"]),
        (unpaired_examples, {"output": "a", "label": 1}, ["no column 'prompt'"]),
    ],
)
def test_bad_rows_are_named(encoder, encode, values, parts):
    with pytest.raises(DataError) as caught:
        encode(row(**values), encoder)
    for part in ["file.jsonl row 7", *parts]:
        assert part in str(caught.value)


class TestOpenRLHFKeys:
    """`input`, `output`, `label`, and chosen and rejected conversations that contain the prompt."""

    def test_input_and_output_are_prompt_and_completion(self, encoder):
        theirs = supervised_examples(row(input="a", output="b"), encoder)
        assert theirs == supervised_examples(row(prompt="a", completion="b"), encoder)
        theirs = unpaired_examples(row(input="a", output="b", label=0), encoder)
        assert theirs == unpaired_examples(row(prompt="a", completion="b", label=False), encoder)
        theirs = preference_examples(row(input="a", chosen="b", rejected="c"), encoder)
        assert theirs == preference_examples(row(prompt="a", chosen="b", rejected="c"), encoder)

    def test_a_conversation_in_input_alone_counts_the_assistants_turns(self, encoder):
        turns = user("a") + assistant("B") + user("c") + assistant("D")
        assert supervised_examples(row(input=turns), encoder) == supervised_examples(row(messages=turns), encoder)

    def test_whole_conversations_as_chosen_and_rejected(self, encoder):
        turns = user("a") + assistant("b") + user("c")
        theirs = row(chosen=turns + assistant("yes"), rejected=turns + assistant("no"))
        ours = row(prompt=turns, chosen=assistant("yes"), rejected=assistant("no"))
        assert preference_examples(theirs, encoder) == preference_examples(ours, encoder)

    def test_a_whole_conversation_as_output(self, encoder):
        theirs = unpaired_examples(row(output=user("a") + assistant("b"), label=1), encoder)
        assert theirs == unpaired_examples(row(prompt=user("a"), completion=assistant("b"), label=1), encoder)

    def test_text_becomes_messages_with_chat(self, encoder):
        wrapping = Encoder(byte_tokenizer(), EncodingOptions(chat=True))
        for encode, text, chat in (
            (
                supervised_examples,
                row(input="a", output="b"),
                row(prompt=user("a"), completion=assistant("b")),
            ),
            (
                preference_examples,
                row(prompt="a", chosen="b", rejected="c"),
                row(prompt=user("a"), chosen=assistant("b"), rejected=assistant("c")),
            ),
        ):
            assert encode(text, wrapping) == encode(chat, encoder)


class TestPlaceholders:
    """Steps marked inside one text."""

    @pytest.fixture
    def encoder(self):
        return Encoder(byte_tokenizer(), EncodingOptions(step_placeholder="#", label_tokens=("+", "-")))

    def test_the_token_after_each_placeholder_counts(self, encoder):
        (example,) = step_examples(row(input="q: one# two#", label=["+", "-"]), encoder)
        (tokens,), (labels,) = example.rows, example.token_columns["step_labels"]
        assert whole(encoder, tokens) == "q: one# two#<|im_end|>"
        places = [place for place, counts in enumerate(tokens.response_mask) if counts]
        assert [encoder.tokenizer.decode([tokens.token_ids[place - 1]]) for place in places] == ["#", "#"]
        assert [labels[place] for place in places] == [1.0, 0.0]

    def test_soft_labels_and_the_candidates_of_a_batch(self, encoder):
        (example,) = step_examples(row(input="a#b#", labels=[0.25, 1]), encoder)
        batch = collate_examples([example], pad_token_id=0)
        assert batch["step_labels"][batch.response_mask].tolist() == [0.25, 1.0]
        plus, minus = (encoder.tokenizer(text)["input_ids"][0] for text in "+-")
        assert batch["candidate_ids"][batch.response_mask].tolist() == [[plus, minus]] * 2

    def test_cutting_drops_the_candidates_of_steps_that_are_gone(self, encoder):
        (example,) = step_examples(row(input="a#bcd#", label=[1, 0]), encoder)
        cut = fit(example, LengthSection(max_length=4))
        batch = collate_examples([cut], pad_token_id=0)
        assert batch.response_mask.sum() == 1
        assert batch["candidate_ids"].shape == (1, 4, 2)

    def test_mistakes(self, encoder):
        with pytest.raises(DataError, match="2 placeholders but 1 labels"):
            step_examples(row(input="a#b#", label=["+"]), encoder)
        with pytest.raises(DataError, match="label 'good' is not '\\+' or '-'"):
            step_examples(row(input="a#", label=["good"]), encoder)
        with pytest.raises(ConfigError, match="'good' is 4 tokens"):
            Encoder(byte_tokenizer(), EncodingOptions(label_tokens=("good", "-")))


class TestLimits:
    @pytest.fixture
    def example(self, encoder):
        return preference_examples(row(prompt="12345", chosen="abcdef", rejected="x"), encoder)[0]

    def test_what_fits_is_left_alone(self, example):
        assert fit(example, LengthSection(max_length=12)) is example

    def test_ends_are_cut(self, example, encoder):
        cut = fit(example, LengthSection(max_length=8))
        assert [counted(encoder, tokens) for tokens in cut.rows] == ["abc", "x<|im_end|>"]

    def test_or_dropped_or_refused(self, example):
        assert fit(example, LengthSection(max_length=8, long_rows="drop")) is None
        with pytest.raises(DataError, match=r"row 7: 12 tokens are more than lengths.max_length=8"):
            fit(example, LengthSection(max_length=8, long_rows="error"))

    def test_prompts_without_room_for_an_answer(self, example, encoder):
        with pytest.raises(DataError, match=r"row 7: the prompt has 5 tokens"):
            fit(example, LengthSection(max_length=5))
        assert fit(example, LengthSection(max_length=5, long_prompts="drop")) is None
        kept = fit(example, LengthSection(max_length=5, long_prompts="keep_end"))
        assert [whole(encoder, tokens) for tokens in kept.rows] == ["cdef<|im_end|>", "345x<|im_end|>"]
        assert not any(tokens.response_mask[0] for tokens in kept.rows)

    def test_the_report_counts(self, encoder):
        rows = [row(prompt="12", completion=text) for text in ("a", "abcdefgh")]
        rows.append(row(prompt="1234567890", completion="x"))
        limit = LengthSection(max_length=6, long_prompts="drop")
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
                LengthSection(max_length=4, long_prompts="drop"),
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


class TestPairsThatPreferNothing:
    @pytest.mark.parametrize(
        "values",
        [
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {"chosen": "ab", "rejected": "ab"},
            {"prompt": user("a"), "chosen": assistant("b"), "rejected": assistant("b")},
        ],
    )
    def test_equal_answers_make_no_example_and_are_counted_and_named(self, encoder, values, caplog):
        good = row(prompt="a", chosen="b", rejected="c")
        lengths = LengthSection()
        for encode, made in ((preference_examples, 1), (unpaired_examples, 2)):
            examples, report = encode_rows([good, row(**values)], encode, encoder, lengths)
            assert (len(examples), report.equal) == (made, 1)
            assert "1 left out with equal answers" in str(report)
        assert "chosen and rejected, or their scores, are equal: 1 (file.jsonl row 7)" in caplog.text

    def test_nothing_but_equal_answers_is_refused(self, encoder):
        rows = [row(prompt="a", chosen="b", rejected="b")] * 2
        with pytest.raises(
            DataError, match=r"file\.jsonl: chosen and rejected are equal, or have equal scores, in 2 of 2 rows"
        ):
            encode_rows(rows, preference_examples, encoder, LengthSection())

    @pytest.mark.parametrize("empty", ["", " \n", assistant("")])
    @pytest.mark.parametrize("side", ["chosen", "rejected"])
    def test_an_empty_answer_is_refused(self, encoder, empty, side):
        text = isinstance(empty, str)
        answers = {"chosen": "b" if text else assistant("b"), "rejected": "c" if text else assistant("c")}
        values = {"prompt": "a" if text else user("a"), **answers, side: empty}
        with pytest.raises(DataError, match=f"file.jsonl row 7: {side} is empty"):
            preference_examples(row(**values), encoder)

    def test_a_message_that_only_calls_a_tool_is_not_empty(self):
        call = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
        prompt, chosen, _ = split_pair(row(prompt=user("a"), chosen=call, rejected=assistant("no")))
        assert (prompt, chosen) == (user("a"), call)
