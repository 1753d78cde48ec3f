"""The directory of a run: who owns it, what it was begun with, its checkpoints, and what becomes of a full disk."""
