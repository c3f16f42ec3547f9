"""The commands, one module each: its arguments, what it does, and examples."""
