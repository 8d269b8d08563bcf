"""`python -m tcb` is the command `tcb`."""

from tcb.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
