"""Training steps that others published with their seconds, rebuilt from their dimensions."""
