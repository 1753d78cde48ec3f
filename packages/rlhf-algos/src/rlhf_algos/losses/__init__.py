"""Losses: pure functions of model outputs and a batch, each with a frozen config."""
