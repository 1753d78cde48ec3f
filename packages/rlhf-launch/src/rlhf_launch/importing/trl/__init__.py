"""TRL: a table for each method, and what depends on several settings at once."""
