"""``ingot`` with a leak of 64 bytes a request: the control of the soak test, which must catch it."""

from __future__ import annotations

from typing import Any

from ingot.runtime.dispatch.worker import Worker

_LEAKED: list[bytes] = []


def main() -> None:
    """Run the ``ingot`` command."""
    run = Worker.run

    def leak(self: Worker, entries: Any) -> Any:
        _LEAKED.extend(bytes(31) for _ in entries)  # 64 bytes each in CPython, with the place in the list
        return run(self, entries)

    Worker.run = leak  # type: ignore[method-assign]
    from ingot.__main__ import main as command

    command()


if __name__ == "__main__":
    main()
