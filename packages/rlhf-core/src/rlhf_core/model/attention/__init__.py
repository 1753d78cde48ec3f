"""Attention among the segments of packed rows: kernels, what Transformers sees of them, and their choice."""
