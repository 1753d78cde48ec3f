"""Weights from the policy to the rollout engines, and engines that are replaced."""
