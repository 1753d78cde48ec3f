"""An ASGI application served from a thread of this process."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn
from rlhf_core import ConfigError, DeadlineExceeded

_START_S = 30.0


class ServerThread:
    """Listens when constructed. Handlers run on the thread's event loop.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, app: Any, *, host: str, port: int) -> None:
        try:
            # Bound here and handed over open, so that nobody can take the port in between.
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port (0: any)") from error
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="gateway", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and wait for the thread."""
        self._server.should_exit = True
        self._thread.join(_START_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the server at {self.address} did not stop within {_START_S:g} s")
        self._socket.close()
