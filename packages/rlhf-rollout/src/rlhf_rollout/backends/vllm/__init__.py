"""Rollout by vLLM."""
