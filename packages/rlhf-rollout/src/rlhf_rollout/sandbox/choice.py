"""Which sandbox a configuration means."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rlhf_core import CapabilityError, ConfigError, Sandbox

from rlhf_rollout.sandbox.bubblewrap import BubblewrapSandbox
from rlhf_rollout.sandbox.container import ContainerSandbox
from rlhf_rollout.sandbox.remote import RemoteSandbox
from rlhf_rollout.sandbox.unconfined import UnconfinedSandbox

_LOG = logging.getLogger(__name__)


def open_sandbox(choice: str = "auto", *, what: str = "programs") -> Sandbox:
    """The sandbox that a configuration names, tried with a small program.

    Args:
        choice: `bubblewrap`, `container`, `container:IMAGE`, an address (http://, https://), `auto` for the first
            of bubblewrap and container that works here, or `none`, which protects nothing and warns.
        what: whose programs they are, for messages.

    Raises:
        CapabilityError: it does not work here; with `auto`, none does.
        ConfigError: there is no such sandbox.
    """
    kind, _, image = choice.partition(":")
    if kind in ("http", "https"):
        return RemoteSandbox(choice)
    if kind == "container":
        return ContainerSandbox(image) if image else ContainerSandbox()
    if choice == "bubblewrap":
        return BubblewrapSandbox()
    if choice == "none":
        _LOG.warning(
            "%s run without a sandbox, as the configuration says: they can read and change whatever this user can",
            what,
        )
        return UnconfinedSandbox()
    if choice != "auto":
        raise ConfigError(
            f"there is no sandbox {choice!r}; write auto, bubblewrap, container, container:IMAGE, the address of a "
            "server, or none"
        )
    reasons = []
    providers: tuple[Callable[[], Sandbox], ...] = (BubblewrapSandbox, ContainerSandbox)
    for provider in providers:
        try:
            return provider()
        except CapabilityError as error:
            reasons.append(str(error))
    raise CapabilityError(
        f"{what}: this machine has no sandbox for programs that a model wrote ({'; '.join(reasons)}). Install "
        "bubblewrap, write the address of a server for them (sandbox: http://...), or run them unprotected "
        "(sandbox: none)"
    )
