"""What is refused before an engine starts."""

import pytest
from rlhf_core import ConfigError
from rlhf_launch.online.preflight import check_inputs


def test_a_weight_transport_that_there_is_not(settings, make_config):
    config = make_config(settings, weight_sync__transport="gluu")
    with pytest.raises(ConfigError, match=r"no weight transport 'gluu'; choose one of .*gloo.*shm"):
        check_inputs(config)
