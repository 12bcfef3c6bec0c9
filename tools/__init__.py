"""Small scripts: show a batch, show a run, write the page of options."""
