"""What clients speak to the gateway."""
