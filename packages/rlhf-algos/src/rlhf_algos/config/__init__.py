"""Configuration files: typed, and strict about unknown keys."""
