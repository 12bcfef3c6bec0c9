"""Weights and tokenizers from and to other libraries' formats."""
