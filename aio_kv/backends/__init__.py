"""Storage backends: each in a file of its own."""
