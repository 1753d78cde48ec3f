"""ToolEnvironment and EnvironmentReward, alone and in the agent loop with a chat template."""

import asyncio

import pytest
from rlhf_core import ConfigError, SamplingConfig, ToolCall, Turn
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, EnvironmentReward, ToolEnvironment, tool_call_parser


def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: one.
        right: the other.
    """
    return left + right


def make(**changes) -> ToolEnvironment:
    environment = ToolEnvironment([add], **changes)
    environment.reset({"prompt": "2 + 3?", "answer": "5"})
    return environment


def turn(*calls: ToolCall, text: str = "") -> Turn:
    return Turn(token_ids=(1,), text=text, tool_calls=calls)


def test_it_shows_the_question_and_the_tools():
    said = ToolEnvironment([add], system="Use tools.").reset({"prompt": "2 + 3?"})
    assert [m["content"] for m in said.messages] == ["Use tools.", "2 + 3?"]
    (schema,) = said.tools
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"left", "right"}


def test_calls_are_carried_out_in_order():
    said = make().step(turn(*(ToolCall(name="add", arguments={"left": n, "right": 1}) for n in (1, 2))))
    assert [m["content"] for m in said.messages] == ["2", "3"]
    assert not said.done
    assert said.info == {"tool_calls": 2, "tool_errors": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall(name="", error="not JSON"), "error: not JSON"),
        (ToolCall(name="sub"), "error: there is no tool 'sub'; there are add"),
        (ToolCall(name="add", arguments={"left": 1}), "missing 1 required"),
        (ToolCall(name="add", arguments={"left": 1, "right": "x"}), "unsupported operand"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_and_may_cost(call, message):
    said = make(error_reward=-0.5).step(turn(call))
    assert message in said.messages[0]["content"]
    assert (said.reward, said.done, said.info["tool_errors"]) == (-0.5, False, 1)


def test_a_turn_without_a_call_is_the_answer():
    said = make(grade=lambda answer, row: float(answer == row["answer"])).step(turn(text="5"))
    assert (said.reward, said.done) == (1.0, True)


def test_long_results_are_cut():
    def loud() -> str:
        return "x" * 100

    environment = ToolEnvironment([loud], max_result_chars=10)
    assert environment.step(turn(ToolCall(name="loud"))).messages[0]["content"] == "x" * 10


def test_tools_and_grade_by_their_paths():
    environment = ToolEnvironment(["operator:add", add], grade="operator:ne")
    said = environment.step(turn(ToolCall(name="add", arguments={"left": 2, "right": 3})))
    assert said.messages[0]["content"] == "5"
    assert environment.step(turn(text="5")).reward == 1.0


def test_no_tools_no_environment():
    with pytest.raises(ConfigError, match="at least one tool"):
        ToolEnvironment([])


def test_in_the_loop_with_a_chat_template():
    tokenizer = byte_tokenizer()
    call = '<tool_call>{"name": "add", "arguments": {"left": 2, "right": 3}}</tool_call>'

    def script(request, index):
        shown = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return tokenizer(("It is 5" if "tool\n5" in shown else call) + "<|im_end|>")["input_ids"]

    loop = AgentLoop(
        ScriptedBackend(script=script),
        tokenizer,
        AgentConfig(
            environment=ToolEnvironment,
            environment_options={"tools": [add], "grade": lambda answer, row: float(answer == "It is 5")},
        ),
        sampling=SamplingConfig(max_tokens=128),
        max_tokens=512,
        parse_tool_calls=tool_call_parser(tokenizer, "tagged_json"),
    )
    (t,) = asyncio.run(loop.run([AgentTask(group_id="g", metadata={"prompt": "2 + 3?"})]))
    assert tokenizer.decode(t.token_ids, skip_special_tokens=False) == (
        f"<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nIt is 5<|im_end|>"
    )
    sampled = tokenizer.decode([i for i, s in zip(t.token_ids, t.response_mask, strict=True) if s])
    assert sampled == f"{call}<|im_end|>It is 5<|im_end|>"
    (score,) = asyncio.run(EnvironmentReward().score([t], [""]))
    assert (score.value, score.components) == (1.0, {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0})
    assert t.rewards[-1] == 1.0
