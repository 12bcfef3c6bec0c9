"""The parts of train.py: loss, step, optimizer, checkpoints, metrics."""
