"""Ways for weights to travel."""
