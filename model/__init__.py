"""The mathematics of attention: functions, blocks and whole architectures. Imports nothing of this project but itself."""
