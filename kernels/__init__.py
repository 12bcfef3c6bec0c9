"""Functions in the form that XLA computes fastest on one CPU. Their values are the same as in the plain form."""
