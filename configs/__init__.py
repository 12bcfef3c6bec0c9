"""Recipes: one file, one experiment. `base` has every option and what it means; `checks` what is possible."""
