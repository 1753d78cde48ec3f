"""`rlhf score`: scores for answers that are there already."""
