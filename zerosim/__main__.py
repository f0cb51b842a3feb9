"""`zerosim`, and `python -m zerosim`: one command. Signals are handled from the first import on."""

import sys

# What `signal` wraps: it is there when Python starts, while `signal` imports enums.
from _signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    try:
        came = list[int]()
        is_raised = getsignal(SIGINT) is default_int_handler  # else somebody has it ignored
        if is_raised:
            signal(SIGINT, lambda number, frame: came.append(number))
        from zerosim.device.interrupts import OneAtATime, no_interrupt_lost

        if is_raised:
            signal(SIGINT, handler := OneAtATime())
            for number in came[:1]:
                handler(number, None)
        with no_interrupt_lost():
            from gc import set_threshold

            from zerosim.cli.main import main as command

            set_threshold(50_000, 20, 50)  # a record is many tuples, which live long and lie in no cycle
            code = command()
            signal(SIGINT, SIG_IGN)  # what follows is Python's end
            return code
    except KeyboardInterrupt as error:  # before the command began, or when it had ended
        signal(SIGINT, SIG_IGN)
        print("zerosim: interrupted", file=sys.stderr)
        return getattr(error, "exit_code", 130)


if __name__ == "__main__":
    sys.exit(main())
