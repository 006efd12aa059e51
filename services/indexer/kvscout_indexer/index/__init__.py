"""Block indexes by pool, and the predictions recorded in them."""
