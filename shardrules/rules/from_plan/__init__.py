"""Rules from a plan: the shortest list of patterns that a person can read and that decides as the plan does."""
