"""A run before it begins: what fits where, what takes how long, and which layout is best."""
