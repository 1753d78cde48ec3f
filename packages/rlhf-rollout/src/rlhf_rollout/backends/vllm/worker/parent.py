"""The end of a worker process whose parent is gone; imported by vLLM, never by this package."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_GRACE_S = 10.0
"""What vLLM's own way of ending may take."""


def end_with_parent() -> None:
    """End this process, if it is one of vLLM's workers, some seconds after its parent.

    vLLM ends such a worker too, but not one that waits in a collective for a worker on a host which is cut off:
    that would hold its device's memory, which a replacement on the same device needs.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("VllmWorker"):
        return

    def watch() -> None:
        parent.join()
        time.sleep(_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
