"""Parts of every training engine: micro-batches, accumulation, dealing to ranks, schedules, random state."""
