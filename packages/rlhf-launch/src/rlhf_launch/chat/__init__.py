"""`rlhf chat`: talk to a model in the terminal, or through a pipe."""
