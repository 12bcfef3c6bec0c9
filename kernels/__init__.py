"""Fast implementations of operations, mostly for one CPU. They compute the same values as plain implementations."""
