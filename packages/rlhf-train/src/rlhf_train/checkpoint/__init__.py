"""Checkpoints: writing, writing in the background, other numbers of ranks."""
