"""Environment variables that a training process must have before it starts."""

from __future__ import annotations

import os

from rlhf_core import EngineConfig


def env_vars(config: EngineConfig) -> dict[str, str]:
    """Variables to set before torch and DeepSpeed are imported; they are read once, at import.

    The launcher adds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. LOCAL_RANK is an index among the
    *visible* devices: 0 where each process sees one device only.

    >>> env_vars(EngineConfig(model="m", device="cuda"))["DS_ACCELERATOR"]
    'cuda'
    """
    variables = {
        "DS_ACCELERATOR": config.device.split(":")[0],
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # How many threads a rank has is for whoever places it to say; what the user says travels with it.
    return variables | {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
