"""Runs under a virtual clock: the controller's own code, and engines and faults that are made up."""
