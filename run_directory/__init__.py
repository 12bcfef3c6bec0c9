"""Reads and writes the files of a run: config, records, checkpoints, progress and trained models."""
