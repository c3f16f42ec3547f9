"""The files that `shardrules init` writes: a first guess of rules, and a workflow that checks them."""
