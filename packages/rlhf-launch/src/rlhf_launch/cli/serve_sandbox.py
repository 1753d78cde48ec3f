"""`rlhf serve-sandbox`: run programs for code rewards on other machines."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rlhf_launch.cli.errors import run_command
from rlhf_launch.listening import check_address

_TOKEN = "RLHF_SANDBOX_TOKEN"


def serve_sandbox(
    sandbox: Annotated[str, typer.Option(help="Which: auto, bubblewrap, container, container:IMAGE.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; one that is not loopback needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8770,
    workers: Annotated[int, typer.Option(help="Programs at the same time.")] = 4,
) -> None:
    """Run programs in a sandbox for clients who have the token in RLHF_SANDBOX_TOKEN."""

    def work() -> None:
        token = os.environ.get(_TOKEN, "")
        check_address("serve-sandbox", host, token, _TOKEN)
        import uvicorn
        from rlhf_rollout import SandboxServer, open_sandbox

        server = SandboxServer(open_sandbox(sandbox), token=token, workers=workers)
        try:
            uvicorn.run(server, host=host, port=port, lifespan="off", log_level="warning", access_log=False)
        finally:
            server.close()

    run_command(work)
