"""Presets: the rules of systems that users come from, with exactly the results that those give."""
