"""What train.py strings together: loss, step, optimizer, checkpoints, metrics."""
