"""`zerosim`, and `python -m zerosim`: one command. Signals are handled from the first import on."""

from __future__ import annotations

import sys

from zerosim.comm.interrupts import no_interrupt_lost


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    try:
        with no_interrupt_lost():
            from zerosim.cli.main import main as command

            return command()
    except KeyboardInterrupt as error:  # before the command began, or when it had ended
        from zerosim.errors import exit_code

        print("zerosim: interrupted", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
