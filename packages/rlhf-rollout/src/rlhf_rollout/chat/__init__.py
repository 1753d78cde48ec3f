"""Chat messages, their tokens, and the tool calls in them."""
