"""Two mixtures of experts, as users write them and as experts write them by hand."""
