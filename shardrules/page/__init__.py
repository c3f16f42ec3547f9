"""The page of `shardrules report`: one file of HTML with a plan, an audit and an autoplan, without any network."""
