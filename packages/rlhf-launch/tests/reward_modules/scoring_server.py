"""A scoring service and a judge on loopback, for tests of rewards over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def scoring_server() -> Iterator[tuple[str, list[dict]]]:
    """The address, and what was asked so far. A judge rates everything 10, other paths score 0.25."""
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"authorization": self.headers.get("Authorization")})
            if self.path.endswith("/chat/completions"):
                answer = {"choices": [{"message": {"content": "Rating: 10"}}]}
            else:
                answer = {"scores": [0.25] * len(body["completions"])}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
