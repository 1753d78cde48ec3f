"""Chains of runs: supervised training, a reward model, reinforcement learning, each from what the last one left."""
