"""The page of `shardrules report`: one HTML file with a plan, an audit and an autoplan, which loads nothing else."""
