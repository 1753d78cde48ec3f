"""The engine's weights for others: for rollout engines, for files, averaged, merged."""
