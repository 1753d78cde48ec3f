"""What is refused before an engine starts."""

import sys

import pytest
from rlhf_core import ConfigError, PluginError, UserError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.online.preflight import check_inputs


def test_a_weight_transport_that_there_is_not(settings, make_config):
    config = make_config(settings, weight_sync__transport="gluu")
    with pytest.raises(ConfigError, match=r"no weight transport 'gluu'; choose one of .*gloo.*shm"):
        check_inputs(config)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": ["no-such-program-here"]}, "there is no command 'no-such-program-here'"),
        ({"program": "launch_rewards:nobody"}, "'launch_rewards' has no attribute 'nobody'"),
        ({"program": "launch_rewards:CountToThree"}, "program_options do not fit"),
        ({"environment": "launch_rewards:CountToThree", "environment_options": {"to": 4}}, "do not fit"),
    ],
)
def test_an_agent_that_there_is_not(settings, make_config, agent, message):
    with pytest.raises(UserError, match=message):
        check_inputs(make_config(settings, rollout__agent=agent))


def test_a_program_needs_a_chat_template_and_the_gateway(settings, make_config, monkeypatch):
    config = make_config(settings, rollout__agent={"program": "builtins:print"})
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_launch.online.preflight.policy_tokenizer", lambda model: plain_tokenizer())
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            check_inputs(config)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "rlhf_rollout.gateway.app", raising=False)
    with pytest.raises(PluginError, match=r"talks to the gateway, but .*rlhf-rollout\[gateway\]"):
        check_inputs(config)


def plain_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer
