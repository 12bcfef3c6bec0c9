"""The files of a run: config, records, checkpoints, progress and trained models. Also reads parts of other runs."""
