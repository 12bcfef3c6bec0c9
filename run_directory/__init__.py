"""The files of a run: config, records, checkpoints, progress, trained models, and what is taken from other runs."""
