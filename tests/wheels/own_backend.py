"""Run where all rlhf wheels and the example backend are installed: a run with the backend chosen by name."""

import json
import tempfile
from importlib.metadata import entry_points
from pathlib import Path


def letters(completions: list[str], **columns: object) -> list[float]:
    """The share of letters: a random model earns a little of it, so there is something to learn from."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Two GRPO steps with the external backend and no vLLM in sight."""
    from importlib.util import find_spec

    names = {entry.name: entry.dist.name for entry in entry_points(group="rlhf.rollout_backends") if entry.dist}
    if names.get("plain") != "rlhf-rollout-plain":
        raise SystemExit(f"the example backend is not registered; found {names}")
    if find_spec("vllm"):
        raise SystemExit("this environment was meant to be without vLLM")
    from rlhf_algos import from_mapping
    from rlhf_core.testing.tiny import save_tiny_model
    from rlhf_launch import OnlineConfig, train

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(8))
        )
        settings = {
            "model": save_tiny_model(folder / "model"),
            "data": {"train": str(prompts)},
            "reward": {"function": "own_backend:letters"},
            "algorithm": "grpo",
            "rollout": {"backend": "plain", "samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
            "train": {"engine": "torch", "prompts_per_step": 4, "steps": 2},
            "placement": {"executor": "local"},
            "output": str(folder / "run"),
        }
        config = from_mapping(OnlineConfig, settings, source="test")
        result = train(config)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        if result.steps != 2 or [row["weight_version"] for row in rows] != [1, 2]:
            raise SystemExit(f"the run did not take two steps: {rows}")
        if not all(row["grad_norm"] > 0 for row in rows):
            raise SystemExit(f"nothing was learnt, so nothing was synced: {rows}")
        if not all(row["mismatch/log_prob_max"] < 1e-4 for row in rows):
            raise SystemExit(f"the backend's log-probs differ from the trainer's: {rows}")
        print("own backend: 2 steps, weights synced, log-probs agree to 1e-4")


if __name__ == "__main__":
    main()
