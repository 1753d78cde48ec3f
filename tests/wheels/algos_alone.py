"""Run in an environment that holds only the rlhf-algos wheel: DPO and KTO train, and nothing heavy came along."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

UNWANTED = ["ray", "vllm", "deepspeed", "rlhf_train", "rlhf_rollout", "rlhf_launch", "pytest"]
PAIRS = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1}"} for n in range(1, 25)]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]


def train(method: str, rows: list[dict], folder: Path, model: Path) -> None:
    """Run the command as a user would, and load what it saved."""
    data = folder / f"{method}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / f"{method}.yaml"
    settings = {"model": str(model), "data": {"train": str(data)}, "output": str(folder / method)}
    config.write_text(json.dumps(settings | {"train": {"batch_size": 8}}))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("rlhf-algos")), method, str(config)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stdout}\n{finished.stderr}")
    from transformers import AutoModelForCausalLM

    saved = next(path.parent for path in (folder / method).rglob("model*.safetensors"))
    AutoModelForCausalLM.from_pretrained(saved)
    print(f"rlhf-algos {method}: trained and saved")


def main() -> None:
    """Check the environment, then train."""
    found = [name for name in UNWANTED if find_spec(name)]
    if found:
        raise SystemExit(f"rlhf-algos alone brought along {', '.join(found)}")
    names = sorted({distribution.metadata["Name"].lower() for distribution in distributions()})
    print(f"{len(names)} distributions: {' '.join(names)}")
    from rlhf_core.testing.tiny import save_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(save_tiny_model(folder / "model"))
        train("dpo", PAIRS, folder, model)
        train("kto", LABELLED, folder, model)


if __name__ == "__main__":
    main()
