"""Episodes of several turns in an environment."""
