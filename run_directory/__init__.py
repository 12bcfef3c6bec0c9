"""The files of a run: config, records, checkpoints, progress, trained models, and the parts from other runs."""
