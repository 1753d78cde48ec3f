"""Rollout by Transformers models."""
