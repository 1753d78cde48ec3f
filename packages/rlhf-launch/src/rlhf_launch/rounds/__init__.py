"""`rlhf iterate`: generate, score, select, train, and again with the model that came of it."""
