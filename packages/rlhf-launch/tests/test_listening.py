"""Who may be served."""

import pytest
from rlhf_core import ConfigError
from rlhf_launch.listening import check_address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    check_address("serve-x", host, "", "X_TOKEN")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "gpu-1"])
def test_other_addresses_need_one(host):
    with pytest.raises(ConfigError, match="X_TOKEN"):
        check_address("serve-x", host, "", "X_TOKEN")
    check_address("serve-x", host, "t", "X_TOKEN")
