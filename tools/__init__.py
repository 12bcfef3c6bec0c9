"""Scripts that export, import, distil, plan and show models, runs and batches, and write the page of options."""
