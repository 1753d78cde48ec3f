"""What to train on among answers that have scores: pure functions, the same for the same seed."""
