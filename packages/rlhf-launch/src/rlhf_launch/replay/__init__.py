"""Replays: a kept step taken again on one process, and where its numbers part."""
