"""How fast vLLM generates with a model of a real size, as the backend runs it and with other settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_models import largest_served, save_config
from gpu_registry import gpu_check

SCRIPT = Path(__file__).with_name("gpu_vllm_speed.py")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "our backend": ("backend", {}),
    "our backend, steps in turn": ("backend", {"async_scheduling": False}),
    "our backend, 2,048 batched tokens": ("backend", {"max_num_batched_tokens": 2048}),
    "our backend, requests without seeds": ("backend", {"seeds": False}),
    "our backend, eager": ("backend", {"enforce_eager": True}),
    "our backend, 4 syncs, computed again": ("backend", {"syncs": 4}),
    "our backend, 4 syncs, states kept": ("backend", {"syncs": 4, "keep": True}),
    "vLLM alone, 2,048 batched tokens": ("engine", {"async_scheduling": False, "max_num_batched_tokens": 2048}),
    "vLLM alone, asynchronous scheduling": ("engine", {"async_scheduling": True, "max_num_batched_tokens": 2048}),
    "vLLM alone, asynchronous, 16,384": ("engine", {"async_scheduling": True, "max_num_batched_tokens": 16_384}),
}


@gpu_check(
    "vLLM: tokens/s", "256 and 1,024 requests: scheduling, batch limits, seeds, graphs, syncs", packages=["vllm"]
)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("requests", [256, 1024])
def test_tokens_per_second(requests: int, setting: str, tmp_path: Path, measure: Any) -> None:
    size = largest_served()
    kind, options = SETTINGS[setting]
    command = [sys.executable, str(SCRIPT), kind, save_config(size, tmp_path), str(requests), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    speed = json.loads(line.removeprefix("result "))
    measure("vLLM, 256 tokens after 256", f"{size}, {requests:,} requests, {setting}", f"{speed:,.0f} tokens/s")
    assert speed > 0
