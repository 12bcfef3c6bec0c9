"""Reads and writes weights and tokenizers in the formats of other libraries."""
