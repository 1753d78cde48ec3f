"""Turns to trajectories: branches, shared turns, several temperatures."""

import pytest
from rlhf_core import LogProbMeaning, Sample
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import ChatTokens, RecordedSession

USER = {"role": "user", "content": "a"}
MORE = {"role": "user", "content": "b"}


def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokens():
    return ChatTokens(byte_tokenizer())


@pytest.fixture
def talk(tokens):
    """Records an answer to `messages` in a session and returns the turn."""

    def talk(session, messages, text, *, version=0, meaning=None, end="<|im_end|>"):
        ids = tuple(tokens.tokenizer(text + end, add_special_tokens=False)["input_ids"])
        sample = Sample(
            token_ids=ids,
            log_probs=(-0.5,) * len(ids),
            weight_versions=(version,) * len(ids),
            finish_reason="stop" if end else "length",
        )
        prompt = session.prompt(tokens, messages, [])
        return session.record(
            prompt, sample, meaning or LogProbMeaning(), messages=[*messages, say(text)], tools=[]
        )

    return talk


def make_session():
    return RecordedSession(session_id="s", group_id="g", metadata={"answer": "4"})


def test_one_conversation_is_one_trajectory(tokens, talk):
    session = make_session()
    first = talk(session, [USER], "hi", version=3)
    second = talk(session, [USER, say("hi"), MORE], "yo", version=4)
    (trajectory,) = session.trajectories()
    assert trajectory.token_ids == second.token_ids
    assert trajectory.token_ids[: len(first.token_ids)] == first.token_ids
    assert trajectory.response_length == 6
    assert trajectory.prompt_length == len(first.context)
    assert [v for v in trajectory.weight_versions if v >= 0] == [3, 3, 3, 4, 4, 4]
    assert (trajectory.group_id, trajectory.metadata, trajectory.truncated) == ("g", {"answer": "4"}, False)
    assert session.misses == 0


def test_branches_share_tokens_but_train_each_only_once(talk):
    session = make_session()
    talk(session, [USER], "hi")
    talk(session, [USER, say("hi"), MORE], "one")
    talk(session, [USER, say("hi"), MORE], "three")
    one, two = session.trajectories()
    assert one.response_length == 3 + 4
    assert two.response_length == 6
    shared = two.prompt_length
    assert one.token_ids[:shared] == two.token_ids[:shared]


def test_an_edited_answer_is_a_conversation_of_its_own(talk):
    session = make_session()
    talk(session, [USER], "hi")
    talk(session, [USER, say("hi!"), MORE], "yo")
    assert session.misses == 1
    assert [t.response_length for t in session.trajectories()] == [3, 3]


def test_an_edit_after_a_recorded_turn_continues_from_that_turn(tokens, talk):
    session = make_session()
    first = talk(session, [USER], "hi")
    prompt = session.prompt(tokens, [USER, say("hi"), MORE, say("said by another"), USER], [])
    assert prompt.parent is first
    assert session.misses == 1


def test_a_conversation_that_begins_with_examples_counts_as_a_miss_once(tokens):
    session = make_session()
    assert session.prompt(tokens, [USER, say("example"), MORE], []).parent is None
    assert session.misses == 1


def test_turns_of_several_temperatures_come_as_several_trajectories(talk):
    session = make_session()
    talk(session, [USER], "hi", meaning=LogProbMeaning(temperature=1.0))
    talk(session, [USER, say("hi"), MORE], "yo", meaning=LogProbMeaning(temperature=0.5))
    one, two = session.trajectories()
    assert one.token_ids == two.token_ids
    assert (one.meaning.temperature, two.meaning.temperature) == (1.0, 0.5)
    assert not any(a and b for a, b in zip(one.response_mask, two.response_mask, strict=True))


def test_a_cut_off_turn_is_flagged_and_closed_by_the_template(tokens, talk):
    session = make_session()
    talk(session, [USER], "hi", end="")
    (cut,) = session.trajectories()
    assert cut.truncated
    prompt = session.prompt(tokens, [USER, say("hi"), MORE], [])
    assert prompt.context[0] == tokens.tokenizer.eos_token_id
    assert prompt.token_ids == tokens.prompt([USER, say("hi"), MORE])


def test_a_session_without_turns_has_no_trajectories():
    assert make_session().trajectories() == []


# As Qwen 3 writes it: thoughts stay behind the last user message alone, and empty ones only in the last turn.
THINKING_TEMPLATE = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}
{{ m.content }}{%- for call in m.tool_calls or [] -%}{{ '[' + call.function.name + ']' }}{%- endfor -%}
{{ '<|im_end|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@pytest.mark.parametrize("thought", ["Hm.", ""])
def test_a_tool_loop_with_thoughts_that_the_client_drops_is_one_trajectory(tokens, thought):
    tokens.tokenizer.chat_template = THINKING_TEMPLATE
    session, messages, sampled = make_session(), [USER], []
    for step in range(4):
        call = {"id": str(step), "type": "function", "function": {"name": "look", "arguments": "{}"}}
        spoken = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = f"<think>\n{thought}\n</think>\n\n[look]<|im_end|>"
        ids = tokens.tokenise(text)
        sample = Sample(
            token_ids=ids, log_probs=[-1.0] * len(ids), weight_versions=[0] * len(ids), finish_reason="stop"
        )
        prompt = session.prompt(tokens, messages, [])
        said = {**spoken, "reasoning_content": thought} if thought else spoken
        session.record(prompt, sample, LogProbMeaning(), messages=[*messages, said])
        sampled += ids
        # The client sends neither the thought nor the call's id as they were.
        call = {**call, "id": f"renamed-{step}"}
        messages = [*messages, {**spoken, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
    (trajectory,) = session.trajectories()
    kept = [t for t, mask in zip(trajectory.token_ids, trajectory.response_mask, strict=True) if mask]
    assert kept == sampled
    assert session.misses == 0
    assert tokens.tokenizer.decode(list(trajectory.token_ids)).count("<|im_start|>tool\nseen<|im_end|>") == 3
