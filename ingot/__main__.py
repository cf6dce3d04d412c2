"""``python -m ingot`` is the ``ingot`` command."""

import sys


def main() -> None:
    """Run the command; Ctrl-C ends it with 130 and one word, also while its modules are read."""
    try:
        from ingot.cli import interrupts

        interrupts.watch()
        from ingot.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
