"""`rlhf select`: from scored answers to a file that `rlhf offline` trains on."""
