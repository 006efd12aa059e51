"""The schedulers as the gateway calls them: one is attached to, and holds what this gateway has booked."""
