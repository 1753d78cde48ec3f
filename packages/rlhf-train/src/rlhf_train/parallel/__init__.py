"""The training ranks, and the tokens and layers that are cut over them."""
