"""The version of the JSON of autoplans, apart from what writes it: a command that reads one needs no planner."""

FORMAT = 2
"""A change that older readers would misread raises it."""

TRAINING_FORMAT = 1
"""The same for training plans."""
