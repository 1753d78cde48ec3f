"""Workers and the handles through which the loop speaks to them."""
