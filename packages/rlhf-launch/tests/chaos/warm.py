"""A process that has imported everything, and is a run's command in a moment: most of a small start is imports.

As a program it reads requests, a JSON line each, and forks a child for each, which leads a session of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_MODULES = (
    *("phases", "rlhf_algos.command", "rlhf_algos.offline.loop", "rlhf_launch.cli.main", "rlhf_launch.online.run"),
    *("rlhf_rollout.backends.transformers.backend", "transformers.models.qwen2.modeling_qwen2"),
)


class WarmProcess:
    """A child of the warm process, as `subprocess.Popen` would have it."""

    def __init__(self, server: WarmStarter, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._server = server

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """The exit code, when it has ended."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code


class WarmStarter:
    """The warm process; a context manager."""

    def __init__(self) -> None:
        self._server: Any = None

    def start(self, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]) -> WarmProcess:
        """Run `phases.py` with these arguments in a new process, whose output goes to `log`."""
        request = {"arguments": list(arguments), "log": str(log), "env": dict(env)}
        return WarmProcess(self, self.ask(request)["pid"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        if self._server is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen([sys.executable, str(HERE / "warm.py")], **pipes)
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def __enter__(self) -> WarmStarter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()


def _child(request: Mapping[str, Any]) -> None:
    """Become the command."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])
    sys.argv = ["phases.py", *request["arguments"]]
    import phases

    phases.main()


def serve() -> None:
    """Answer requests until there are no more."""
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    answers, codes = os.fdopen(os.dup(1), "w"), {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
            print(json.dumps({"code": codes.get(pid)}), file=answers, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _child(request)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), file=answers, flush=True)


if __name__ == "__main__":
    serve()
