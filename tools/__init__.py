"""Scripts besides the three: show a batch, show a run."""
