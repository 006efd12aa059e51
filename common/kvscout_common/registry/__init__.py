"""The workers that there are, and where services learn of them."""
