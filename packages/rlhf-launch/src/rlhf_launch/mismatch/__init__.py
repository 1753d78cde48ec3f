"""`rlhf doctor mismatch`: why sampler and trainer disagree."""
