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
    return {
        "DS_ACCELERATOR": config.device.split(":")[0],
        # Spinning OpenMP threads of several ranks on shared cores slow each other down by a factor of ten.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
