"""Check the subject of a commit message: imperative, capitalized, 12 to 72 characters, no full stop.

``python scripts/commit_subject.py FILE`` is the ``commit-msg`` hook of ``.pre-commit-config.yaml``; git passes the file
with the message. It prints what is wrong with the subject and exits with 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SHORTEST, LONGEST = 12, 72

# Imperatives that end like another form of a verb or like a plural.
_IMPERATIVES = {
    *("Embed", "Feed", "Need", "Seed", "Shed", "Shred", "Speed", "Exceed", "Proceed", "Succeed"),
    *("Bring", "Ping", "String", "Swing", "Spring"),
    *("Alias", "Bias", "Focus", "Canvas"),
}
# First words that begin a description instead of an instruction.
_OTHERS = {
    *(
        "A",
        "An",
        "The",
        "This",
        "These",
        "Some",
        "More",
        "New",
        "No",
        "Now",
        "When",
        "If",
        "Also",
        "Only",
        "Not",
        "For",
    ),
    *("What", "Who", "How", "Where", "It", "We", "I", "Wip", "WIP", "Misc", "Minor", "Various", "Cleanup", "Work"),
}


def faults(message: str) -> list[str]:
    """Return the fault of a commit message's subject; merges and reverts made by git are accepted."""
    subject, *rest = message.splitlines() or [""]
    if re.match(r"Merge |Revert \"", subject):
        return []
    word = subject.split(maxsplit=1)[0] if subject.strip() else ""
    found = []
    if not SHORTEST <= len(subject) <= LONGEST:
        found.append(f"it has {len(subject)} characters; write {SHORTEST} to {LONGEST} and put the rest into the body")
    if not word[:1].isupper():
        found.append("it does not start with a capital letter")
    elif word in _OTHERS or (word not in _IMPERATIVES and re.search(r"(?:ed|ing|[^s]s|\W)$", word)):
        found.append(f"'{word}' is not an imperative; write what the commit does, such as 'Add ...' or 'Refuse ...'")
    if subject.endswith("."):
        found.append("it ends with a full stop")
    if rest and rest[0].strip() and not rest[0].startswith("#"):
        found.append("the line after it is not empty")
    return found


def main(path: str) -> int:
    """Print what is wrong with the message in a file; return the exit status."""
    message = Path(path).read_text()
    found = faults(message)
    for fault in found:
        print(f"commit subject '{message.splitlines()[0] if message else ''}': {fault}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
