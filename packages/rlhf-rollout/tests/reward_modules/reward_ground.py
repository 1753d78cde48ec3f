"""What the tests of rewards share: trajectories, and a server on loopback that can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf_core import RewardFunction, Trajectory


def trajectory(index: int | str, *, response: int = 1, **metadata: Any) -> Trajectory:
    return Trajectory(
        sample_id=f"s{index}",
        group_id="g",
        token_ids=(5,) + (7,) * response,
        response_mask=(False,) + (True,) * response,
        rollout_log_probs=(0.0,) + (-0.5,) * response,
        weight_versions=(-1,) + (0,) * response,
        metadata={"prompt": f"p{index}", **metadata},
    )


def score(reward: RewardFunction, texts: Sequence[str], **metadata: Any) -> list[Any]:
    trajectories = [trajectory(index, **metadata) for index in range(len(texts))]
    return list(asyncio.run(reward.score(trajectories, list(texts))))


def values(reward: RewardFunction, texts: Sequence[str], **metadata: Any) -> list[float]:
    return [one.value for one in score(reward, texts, **metadata)]


Answer = tuple[int, Any]
"""Status and body; a body that is text is sent as it is, anything else as JSON."""


class Server:
    """Answers by a function of the request's body; keeps what it was asked."""

    def __init__(self, answer: Callable[[Any], Answer]) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.paths.append(self.path)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, content = answer(body)
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def servers(*answers: Callable[[Any], Answer]) -> Iterator[list[Server]]:
    """One server for each function."""
    started = [Server(answer) for answer in answers]
    try:
        yield started
    finally:
        for server in started:
            server.close()


def refusing_url() -> str:
    """An address at which nobody listens."""
    server = Server(lambda body: (200, []))
    server.close()
    return server.url
