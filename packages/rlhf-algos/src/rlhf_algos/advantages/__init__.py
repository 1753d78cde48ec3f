"""Advantages, returns and token rewards."""
