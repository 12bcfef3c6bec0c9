"""Analyses of trained models: pictures of attention, the explorer page, importance of heads, comparisons of runs."""
