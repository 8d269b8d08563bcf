"""Reads the command line and runs one of its commands.

What a user got wrong ends with one line on standard error, which names the argument and the value,
and exit code 2; prompts that failed end with 1.
"""

import argparse
import sys
from collections.abc import Sequence

import tcb
from tcb.cli import explain, generate
from tcb.cli.loading import Fault

COMMANDS = {"generate": generate, "explain": explain}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name (those of the process if None); its exit code."""
    parser = argparse.ArgumentParser(
        prog="tcb", description="Continuous batching for Hugging Face transformers models."
    )
    parser.add_argument("--version", action="version", version=f"tcb {tcb.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        duty, _, rest = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=duty,
            description=f"{duty}\n{rest}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    given = parser.parse_args(arguments)
    try:
        return COMMANDS[given.command].run(given)
    except Fault as fault:
        print(f"tcb {given.command}: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
