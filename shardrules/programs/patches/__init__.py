"""Plans written into the user's code: which lines get an annotation, the diff, and the proof that it does what it says."""
