"""Environments and tools that others publish, behind the seam Environment; each needs a package of its own."""
