"""A user's Python function as a reward: in this process, or in processes that can be killed."""
