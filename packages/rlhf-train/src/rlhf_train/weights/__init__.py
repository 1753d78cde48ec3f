"""Weights out of the engine: to rollout engines, to files, averaged."""
