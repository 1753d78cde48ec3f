"""Where a server of ours may listen."""

from __future__ import annotations

import ipaddress

from rlhf_core import ConfigError


def check_address(command: str, host: str, token: str, variable: str) -> None:
    """Refuse to serve the whole network without a token.

    Args:
        command: which listens, for the message.
        host: address or name to listen on.
        token: that clients must send; empty for none.
        variable: environment variable that the token comes from.

    Raises:
        ConfigError: the address is not loopback, and there is no token.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not token:
        raise ConfigError(
            f"{command}: {host} can be reached by others; set {variable} here and for the clients, or listen on "
            "127.0.0.1"
        )
