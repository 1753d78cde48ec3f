"""Weight sync of mixtures of experts: gathered / sent bytes, seconds and memory as experts grow in number.

    python benchmarks/weight_sync_experts.py [--experts 8 64 256] [--ranks 1 2] [--bucket-mib 1]

The trainer is DeepSpeed ZeRO-3 on CPU ranks with a Qwen3-MoE of two layers, in which Transformers keeps all
experts of a layer in two parameters; the receiver, a process of its own, copies into plain tensors, over shared
memory. `gathered` is counted by the sync itself, on rank 0, over the bytes that it sends. `per bucket` is what
that ratio would be if a parameter were gathered again for every bucket that holds some of its experts. `extra MiB`
is how far resident memory rises during a sync: on rank 0 and at the receiver, the maps of both buffers included.
`largest` is the largest parameter, which rank 0 holds as a whole and as the checkpoint has it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from weight_sync import ENVIRONMENT, Remote, together
from weight_sync_sides import MIB, Engine, TrainerRank


def save_model(path: str, experts: int) -> None:
    """Random weights of a small Qwen3-MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def measure(model: str, ranks: int, *, bucket_bytes: int, repeats: int) -> dict[str, float]:
    """One line of the table: the best of `repeats` syncs after a warm-up."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
    trainer = [Remote(TrainerRank, model, rank, ranks, store.port) for rank in range(ranks)]
    receiver = Remote(Engine, model, False)
    for remote in (*trainer, receiver):
        remote.result()
    manifest = together(*((rank, "manifest", bucket_bytes) for rank in trainer))[0]
    link = trainer[0].call("open", "shm", False)
    together((trainer[0], "accept"), (receiver, "connect", link))
    runs = []
    for _ in range(repeats + 1):
        sends = [(rank, "send_counted", manifest) for rank in trainer]
        (taken, _), ((sent, _), report), *_ = together((receiver, "receive", manifest), *sends)
        runs.append((report, sent, taken))
    best = min(runs[1:], key=lambda run: run[0].seconds)
    again, largest = trainer[0].call("gathered_per_bucket", manifest)
    return {
        "megabytes": manifest.total_bytes / 1e6,
        "buckets": len(manifest.buckets()),
        "gathered": best[0].gathered_per_sent,
        "per_bucket": again,
        "seconds": best[0].seconds,
        "sender_mib": max(run[1] for run in runs[1:]),
        "receiver_mib": max(run[2] for run in runs[1:]),
        "largest_mib": largest / MIB,
    }


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bucket-mib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    print(
        "| experts | ranks | MB | buckets | gathered / sent | per bucket | seconds | extra MiB: rank 0", end=" | "
    )
    print("receiver | largest MiB |\n|---|---|---|---|---|---|---|---|---|---|")
    for experts in arguments.experts:
        with tempfile.TemporaryDirectory() as model:
            save_model(model, experts)
            for ranks in arguments.ranks:
                found: dict[str, Any] = measure(
                    model, ranks, bucket_bytes=int(arguments.bucket_mib * MIB), repeats=arguments.repeats
                )
                print(
                    f"| {experts} | {ranks} | {found['megabytes']:.1f} | {found['buckets']} "
                    f"| {found['gathered']:.3f} | {found['per_bucket']:.1f} "
                    f"| {found['seconds']:.3f} | {found['sender_mib']:.1f} "
                    f"| {found['receiver_mib']:.1f} | {found['largest_mib']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
