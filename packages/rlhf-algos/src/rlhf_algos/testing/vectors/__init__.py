"""Frozen vectors: inputs, options, value and gradient of every loss and estimator (docs/vectors.md)."""

from rlhf_algos.testing.vectors.reader import VectorCase, check_vectors, load_vectors

__all__ = ["VectorCase", "check_vectors", "load_vectors"]
