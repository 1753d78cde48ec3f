"""The engine's settings, and the DeepSpeed configuration made of them."""
