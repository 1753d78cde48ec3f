"""`rlhf offline`: the methods of rlhf-algos on placed ranks."""
