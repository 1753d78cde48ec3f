"""What is sampled, and how it is batched."""
