"""The configuration of runs, a module a section."""
