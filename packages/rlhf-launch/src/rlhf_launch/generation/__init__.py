"""`rlhf generate`: samples for a file of prompts."""
