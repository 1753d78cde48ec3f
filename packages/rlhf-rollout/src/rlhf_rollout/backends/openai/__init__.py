"""Rollout by servers that speak the OpenAI API."""
