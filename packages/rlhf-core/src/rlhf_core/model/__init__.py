"""Running a model: packing, attention over packed rows, log-probs in chunks, expert routing."""
