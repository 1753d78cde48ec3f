"""Requests and answers in the forms of OpenAI and Anthropic."""
