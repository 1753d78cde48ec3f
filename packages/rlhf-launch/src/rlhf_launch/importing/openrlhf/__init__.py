"""OpenRLHF: a table for each kind of entry point, and what depends on several flags at once."""
