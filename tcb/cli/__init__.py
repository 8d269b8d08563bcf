"""The command line: `tcb` and `python -m tcb`."""
