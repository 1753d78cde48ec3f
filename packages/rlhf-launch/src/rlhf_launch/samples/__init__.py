"""From prompts to scored groups of samples."""
