"""Comparisons of whole runs: where they part first, and whether that is noise or a change."""
