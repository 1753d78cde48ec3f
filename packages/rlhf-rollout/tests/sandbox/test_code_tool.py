"""The tool that runs the policy's Python."""

from rlhf_core import ProgramLimits, ToolCall, Turn
from rlhf_rollout import CodeTool, ToolEnvironment, UnconfinedSandbox


def test_it_gives_what_is_printed_and_says_how_it_ended():
    run = CodeTool(UnconfinedSandbox(), limits=ProgramLimits(wall_s=1.0), max_chars=1000).run_python
    assert run("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in run("1 / 0")
    assert run("raise SystemExit(3)").endswith("(exit code 3)")
    assert run("while True: pass").endswith("(stopped: too much time)")
    assert run("print('x' * 5000)").endswith("... (5001 characters)")


def test_an_environment_offers_it():
    tool = CodeTool(UnconfinedSandbox())
    environment = ToolEnvironment(tools=[tool.run_python])
    (schema,) = environment.reset({"prompt": "6 * 7?"}).tools
    assert schema["function"]["name"] == "run_python"
    call = ToolCall(name="run_python", arguments={"code": "print(6 * 7)"})
    answer = environment.step(Turn(token_ids=(), text="", tool_calls=(call,)))
    assert answer.messages[0]["content"] == "42\n"
    tool.close()
