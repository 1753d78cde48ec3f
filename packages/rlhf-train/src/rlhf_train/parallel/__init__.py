"""Ranks, and what is split over them."""
