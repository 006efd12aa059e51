"""Plain data of a request on its way."""
