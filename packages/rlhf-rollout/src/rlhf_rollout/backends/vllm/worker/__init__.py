"""What runs inside vLLM's worker processes."""
