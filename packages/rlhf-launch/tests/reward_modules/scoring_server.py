"""A scoring service and a judge on loopback, for tests of rewards over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def scoring_server(faults: Sequence[str] = ()) -> Iterator[tuple[str, list[dict]]]:
    """The address, and what was answered so far. A judge rates everything 10, other paths score 0.25.

    `faults` come first, one per request: `500`, `stall` or `drop`.
    """
    asked: list[dict] = []
    waiting = deque(faults)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if waiting and (fault := waiting.popleft()):
                if fault == "500":
                    self.send_error(500, "on fire")
                elif fault == "stall":
                    time.sleep(1.0)
                self.close_connection = True
                return
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
