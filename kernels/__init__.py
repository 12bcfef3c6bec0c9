"""Faster versions of functions of `model/`, mostly for programs on one CPU device. They compute the same values."""
