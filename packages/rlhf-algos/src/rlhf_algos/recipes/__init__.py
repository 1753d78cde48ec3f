"""Online algorithms, each a choice of rewards, advantages and losses."""
