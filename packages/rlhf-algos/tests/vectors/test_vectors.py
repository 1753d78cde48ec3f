"""The frozen vectors are those of the formulas, and our functions reproduce them in float64 and float32."""

import json
from pathlib import Path

import numpy as np
import pytest
import rlhf_algos
import torch
from rlhf_algos.testing import check_vectors, load_vectors
from rlhf_algos.testing.vectors import reader
from write_vectors import VERSION, all_cases, table

FOLDER = Path(reader.__file__).parent
CASES = {case.name: case for case in all_cases()}
SINGLE = {"length_adaptive_lam", "mismatch_metrics"}
"""Functions whose numbers are float32 whatever comes in: shares of lengths, and metrics."""


def run(name):
    """Our function as `check_vectors` calls it."""

    def call(inputs, options):
        tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in inputs.items()}
        return {key: value.numpy() for key, value in CASES[name].ours(tensors, options).items()}

    return call


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_our_functions_reproduce_the_vectors(name, dtype):
    tolerance = 1e-6 if CASES[name].function in SINGLE and dtype == "float64" else None
    assert list(check_vectors(run(name), name, dtype=dtype, tolerance=tolerance)) == [name]


def test_the_files_are_fresh():
    """`nox -s vectors` writes them. Numbers may differ in the last bits from one machine to another."""
    rows, tensors = table(list(CASES.values()))
    stored = json.loads((FOLDER / reader.CASES).read_text(encoding="utf-8"))
    assert stored["version"] == VERSION
    assert stored["cases"] == json.loads(json.dumps(rows))
    held = reader.load_file(FOLDER / reader.TENSORS)
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert str(held[name].dtype) == str(tensor.dtype).removeprefix("torch."), name
        np.testing.assert_allclose(held[name], tensor.numpy(), rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_vectors_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 2**20


def test_every_loss_and_estimator_has_vectors():
    found = {case.function for case in load_vectors().values()}
    offline = {method.function.__name__ for method in rlhf_algos.METHODS.values()} - {"distill"}
    divergences = {"divergence_from_logits", "divergence_from_top_k"}  # what `distill` is made of
    assert not ({*rlhf_algos.POLICY_LOSSES, *rlhf_algos.ADVANTAGES} | offline | divergences) - found


def test_a_wrong_result_is_named():
    def wrong(inputs, options):
        return {name: value * 1.001 for name, value in load_vectors()["sft/plain"].results.items()}

    with pytest.raises(AssertionError, match="sft/plain: relative errors"):
        check_vectors(wrong, "sft/plain")
    with pytest.raises(AssertionError, match=r"\['weight'\] are missing"):
        check_vectors(lambda inputs, options: {"loss": 0.0}, "value_clip/no_clip", only=("loss", "weight"))
    with pytest.raises(AssertionError, match="has shape"):
        check_vectors(lambda inputs, options: {"loss": [0.0]}, "reinforce/plain", only=("loss",))
    with pytest.raises(KeyError, match="no vectors are named"):
        check_vectors(wrong, "dop")
