"""What every command needs of the system: errors, files, locks, processes, signals, executors, caches."""
