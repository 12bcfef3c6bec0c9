"""Scripts: export and import models, distil, plan trainings, show runs and batches, and write the page of options."""
