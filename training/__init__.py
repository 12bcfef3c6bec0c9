"""Training: objectives, the step, the optimizer, the mesh, the training loop, metrics."""
