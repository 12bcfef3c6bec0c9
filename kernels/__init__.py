"""Functions that XLA computes fastest on one CPU, each with the values of a plain form in model/."""
