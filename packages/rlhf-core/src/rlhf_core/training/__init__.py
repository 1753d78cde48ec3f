"""What every training engine needs: micro-batches, accumulation, schedules, random state."""
