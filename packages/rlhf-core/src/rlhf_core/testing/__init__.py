"""Conformance kits for the seams, and small models to run them on. Needs the extra `testing`."""
