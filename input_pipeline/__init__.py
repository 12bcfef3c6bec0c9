"""The input pipeline, from text to batches.

The steps are: sources -> tokenizer -> token store -> batch plan -> prefetching iterator.
"""
