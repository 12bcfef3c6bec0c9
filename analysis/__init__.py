"""Analyses of trained models: pictures of attention, the explorer page, tests of heads, comparisons of runs."""
