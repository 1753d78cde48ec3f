"""Transports: the ways by which weights travel from a trainer to its generators."""
