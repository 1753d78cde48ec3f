"""`rlhf serve-rm`: a reward model for clients over HTTP."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

_TOKEN = "RLHF_REWARD_TOKEN"


def serve_rm(
    model: Annotated[
        str, typer.Argument(help="Reward model: directory of a run, any model directory, hub name, or adapters.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; one that is not loopback needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8780,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens that go through the model together.")] = 16384,
    max_wait_ms: Annotated[float, typer.Option(help="How long the first request of a batch waits.")] = 10.0,
    max_waiting_tokens: Annotated[
        int, typer.Option(help="Tokens that may wait; beyond them a request is answered 429.")
    ] = 1 << 20,
    max_body_mb: Annotated[float, typer.Option(help="Size of the largest request, in MB.")] = 32.0,
    max_length: Annotated[int | None, typer.Option(help="Longest row in tokens; without it the model's.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Serve MODEL's scores, for rewards of the kind http and for OpenRLHF; the token is in RLHF_REWARD_TOKEN."""
    from typing import get_args

    import uvicorn
    from rlhf_core import ConfigError, DType, check_choice

    from rlhf_launch.listening import check_address
    from rlhf_launch.reward_server.app import ServerLimits
    from rlhf_launch.reward_server.batching import BatchLimits
    from rlhf_launch.reward_server.serve import open_server

    token = os.environ.get(_TOKEN, "")
    check_address("serve-rm", host, token, _TOKEN)
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    check_choice("--dtype", dtype, ("auto", *get_args(DType)))
    if not max_body_mb > 0:
        raise ConfigError(f"--max-body-mb must be positive, got {max_body_mb:g}")
    batching = BatchLimits(
        max_batch_tokens=max_batch_tokens, wait_s=max_wait_ms / 1000, max_waiting_tokens=max_waiting_tokens
    )
    with _bound(host, port) as listening, TemporaryDirectory(prefix="rlhf-serve-rm-") as scratch:
        server = open_server(
            model,
            scratch=Path(scratch),
            token=token,
            device=device,
            dtype=dtype,
            batching=batching,
            limits=ServerLimits(max_body_bytes=int(max_body_mb * 1e6)),
            max_length=max_length,
            trust_remote_code=trust_remote_code,
        )
        number = listening.getsockname()[1]
        typer.echo(f"serving {model} on http://{f'[{host}]' if ':' in host else host}:{number}/score", err=True)
        settings = uvicorn.Config(
            server, lifespan="on", log_level="warning", access_log=False, timeout_graceful_shutdown=60
        )
        uvicorn.Server(settings).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, before anything is loaded; it listens once the server does.

    Raises:
        ConfigError: the address is taken, or is not this machine's.
    """
    from rlhf_core import ConfigError

    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(
            f"serve-rm cannot listen on {host}, port {port}: {error.strerror or error}; choose another "
            "(--port 0: any)"
        ) from None
    return found
