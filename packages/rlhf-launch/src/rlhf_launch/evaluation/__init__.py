"""`rlhf eval`: models on data sets, from the samples that `rlhf generate` writes."""
