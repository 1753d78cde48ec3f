"""The online loop and what it reports and saves."""
