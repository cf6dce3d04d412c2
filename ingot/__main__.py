"""``python -m ingot`` is the ``ingot`` command."""

from ingot.cli.main import main

if __name__ == "__main__":
    main()
