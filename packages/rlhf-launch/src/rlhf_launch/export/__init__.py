"""`rlhf export`: a trained model as others load it, with a card that says how it was made."""
