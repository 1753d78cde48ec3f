"""Rollout backends."""
