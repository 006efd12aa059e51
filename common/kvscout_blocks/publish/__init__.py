"""What bridges and publishers send on: batches, the state where these would not tell, and what readers ask for."""
