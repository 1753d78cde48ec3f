"""Requests, samples, trajectories, and the batches made of them."""
