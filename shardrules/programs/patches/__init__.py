"""Plans written into the user's code: the lines that get an annotation, the diff, and the proof that it is right."""
