"""Offline training: methods, data, reference, loop, checkpoints."""
