"""An OpenAI-compatible server in front of a rollout backend that records what it samples."""
