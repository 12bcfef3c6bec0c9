"""The path from text to batches: sources -> tokenizer -> token store -> batch plan -> prefetching iterator."""
