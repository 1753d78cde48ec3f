"""Checkpoints: written at once or in the background, loaded by any number of ranks."""
