"""Losses on data sets: preferences, labels, demonstrations, teachers."""
