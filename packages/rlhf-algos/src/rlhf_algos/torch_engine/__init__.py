"""The training engine on plain torch."""
