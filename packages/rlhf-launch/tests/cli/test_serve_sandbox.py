"""Who may have programs run."""

import pytest
from rlhf_core import ConfigError
from rlhf_launch.cli.serve_sandbox import check_address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    check_address(host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "gpu-1"])
def test_other_addresses_need_one(host):
    with pytest.raises(ConfigError, match="RLHF_SANDBOX_TOKEN"):
        check_address(host, "")
    check_address(host, "t")
