"""Which workers a run needs and where they run."""
