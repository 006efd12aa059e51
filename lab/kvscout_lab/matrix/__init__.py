"""The matrix: named cells in which policies are compared, run in processes."""
