"""verl: a table of its settings, and what depends on several of them at once."""
