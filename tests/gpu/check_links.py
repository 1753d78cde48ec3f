"""Weight links between processes: values, speed, and a receiver that is killed amid a sync."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gpu_registry import gpu_check
from rlhf_core import GenerationRequest, Link, ModuleWeights, RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.transport import TransportConformance
from rlhf_core.testing.weight_sync import Trainer

ENDS = Path(__file__).with_name("gpu_link_ends.py")


def run_ends(*arguments: str) -> dict[str, Any]:
    """What the trainer's process found; a trainer that dies with its receiver fails the check."""
    done = subprocess.run([sys.executable, str(ENDS), *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"the trainer's process ended with {done.returncode}: {done.stderr[-4000:]}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return json.loads(line.removeprefix("result "))


@gpu_check("link kit: local on CUDA", "the hand-over between threads passes the kit of transports on CUDA")
class TestLocal(TransportConformance):
    kind = "local"
    device: ClassVar[str] = "cuda"
    can_give_up = False


def lost_receiver(kind: str, measure: Any) -> None:
    """A receiver is killed in the middle: an error in time, a living trainer, and a next sync."""
    found = run_ends("killed", kind)
    measure("receiver killed amid a sync", kind, f"{found['error']} after {found['noticed_s']:.1f} s")
    assert found["killed"]
    assert found["error"] in ("WeightSyncError", "DeadlineExceeded")
    assert found["noticed_s"] < 60
    assert found["alive"], "the trainer's device answers no more"
    assert found["next_status"] == 0, "the next sync, to a new receiver, failed"


@gpu_check("link: ipc, receiver killed", "the trainer lives on, and the next sync to a new receiver works")
def test_ipc(measure: Any) -> None:
    lost_receiver("ipc", measure)


@gpu_check("link: nccl, receiver killed", "the same between two GPUs over NCCL", gpus=2)
def test_nccl(measure: Any) -> None:
    lost_receiver("nccl", measure)


@gpu_check("link: speed", "GB/s of a sync of 2 GiB over ipc, shm and gloo")
@pytest.mark.parametrize("kind", ["ipc", "shm", "gloo"])
def test_speed(kind: str, measure: Any) -> None:
    found = run_ends("speed", kind)
    measure("weight sync", f"{kind}, 2 GiB", f"{found['gb_per_s']:.2f} GB/s")
    assert found["status"] == 0


@gpu_check("link: speed of nccl", "GB/s of a sync of 2 GiB between two GPUs", gpus=2)
def test_speed_of_nccl(measure: Any) -> None:
    found = run_ends("speed", "nccl")
    measure("weight sync", "nccl, 2 GiB", f"{found['gb_per_s']:.2f} GB/s")
    assert found["status"] == 0


# ------------------------------------------------------------ from a training process into vLLM

SENDER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from rlhf_core import ModuleWeights, open_sender, send_weights

path, changed, kind, device = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
torch.manual_seed(3)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.03)
model.save_pretrained(changed)
source = ModuleWeights(model.to(device))
sender = open_sender(kind, receivers=1, device=device, timeout_s=120)
print("address", sender.link.address, flush=True)
sender.accept()
sys.stdin.readline()
send_weights(source, source.manifest(7, bucket_bytes=100_000), sender)
sender.close()
"""


def sync_into_vllm(folder: Path, kind: str, device: str) -> None:
    """Changed weights of another process show in the log-probs of vLLM's samples."""
    from rlhf_rollout import VLLMBackend

    model, changed = save_tiny_model(folder / "model"), str(folder / "changed")
    options = {"gpu_memory_utilization": 0.3}
    backend = VLLMBackend(RolloutConfig(model=model, device="cuda", max_model_len=256, options=options))
    command = [sys.executable, "-c", SENDER, model, changed, kind, device]
    request = GenerationRequest(
        request_id="r", prompt_token_ids=list(range(40, 70)), sampling=SamplingConfig(max_tokens=24), n=4, seed=0
    )
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            address = next(line.split()[1] for line in process.stdout if line.startswith("address "))
            asyncio.run(backend.connect(Link(kind=kind, address=address, receivers=1, timeout_s=120), 0))
            process.stdin.write("go\n")
            process.stdin.flush()
            manifest = ModuleWeights(Trainer(model).model).manifest(7, bucket_bytes=100_000)
            asyncio.run(backend.receive_weights(manifest))
            assert process.wait(60) == 0
        samples = asyncio.run(backend.generate(request)).samples
    finally:
        backend.close()
    assert {version for sample in samples for version in sample.weight_versions} == {7}
    gaps = {}
    for path in (changed, model):
        trainer = Trainer(path)
        pairs = [(trainer.log_probs(request, sample), sample.log_probs) for sample in samples]
        gaps[path] = max(float((mine - mine.new_tensor(list(its))).abs().max()) for mine, its in pairs)
    assert gaps[changed] < 0.02
    assert gaps[model] > 0.1, "the changed weights must show, or the check above proves nothing"


@gpu_check("sync into vLLM: ipc", "weights of a training process on the same GPU arrive", packages=["vllm"])
def test_vllm_over_ipc(tmp_path: Path) -> None:
    sync_into_vllm(tmp_path, "ipc", "cuda:0")


@gpu_check("sync into vLLM: nccl", "weights of a process on another GPU arrive", gpus=2, packages=["vllm"])
def test_vllm_over_nccl(tmp_path: Path) -> None:
    sync_into_vllm(tmp_path, "nccl", "cuda:1")
