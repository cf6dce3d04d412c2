"""Find wording that makes a reader stop: translated idioms, clauses used as nouns, homely verbs for mechanisms.

``python scripts/prose.py [PATH ...]`` checks docstrings, comments, messages and help texts of Python files, Markdown,
and the text of build files; by default all files that git does not ignore. ``--count`` prints the number of findings
per folder. Each finding is one line, ``file:line: pattern: text -> write ...``, and the exit status is then 1.

A cell of a Markdown table may have at most 80 characters. Code in backticks, fenced blocks, generated files and results
of benchmarks are skipped. ``prose: ok`` in a comment on the same string, comment or paragraph accepts it, for
instance where the text quotes another program.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# The lint's own patterns and examples.
SKIPPED = {"scripts/prose.py", "tests/test_prose.py"}

ACCEPTED = "prose: ok"

# Characters that a reader sees of a cell; tables that are written from the code may exceed it.
MOST_IN_CELL = 80
GENERATED_TABLES = {"docs/reference/settings.md"}


@dataclass(frozen=True)
class Pattern:
    """One wording to replace; a space in ``regex`` stands for any blank, line breaks included."""

    name: str
    regex: str
    instead: str

    def compile(self) -> re.Pattern[str]:
        return re.compile(self.regex.replace(" ", r"\s+"), re.IGNORECASE)


_START = r"(?:\A\s*|[.;!]\s+|\n\s*\n\s*|\A- )"
_NO_QUESTION = r"(?![^.;]*\?)"
_BE = r"\b(?:is|are|was|were|be|been|being|am)"

PATTERNS = (
    Pattern(
        "is-no",
        rf"(?<!there\s){_BE} no (?!(?:more|less|worse|(?:long|few|fast|slow|larg|small|great|bett|lat|high|low)er)\b|"
        r"doubt\b|one\b)",
        "'is not a ...'; 'there is no ...' is fine",
    ),
    Pattern("is-none", rf"(?<!there\s){_BE} (?-i:none)\b(?! of)", "'is not one', 'does not have one'"),
    Pattern("whoever", r"\bwho(?:m|so)?ever\b", "the role: 'the caller', 'a client that ...', 'anyone who ...'"),
    Pattern("nobody", r"\bnobody\b", "'no client', 'no caller', 'nothing'; 'no one' for a person"),
    Pattern(
        "such-as-subject",
        r"\bsuch as (?:is|are|was|were|have|has|had|do|does|did|can|could|will|would|may|might|must|come|came)\b",
        "'those that ...'",
    ),
    Pattern(
        "what-subject",
        rf"{_START}what (?:would|could|should|might|must|may|can|cannot|will|is|are|was|were|has|have|had|does|did|do|"
        r"comes|came|goes|went|follows|waits|counts|takes|gives|makes|needs|fails|failed|runs|ran|lies|stands|holds|"
        rf"belongs|remains|stays|changes|changed|else)\b{_NO_QUESTION}",
        "a noun: 'a request that ...', 'the values that ...'; start a docstring with a verb",
    ),
    Pattern(
        "return-what",
        r"\A\s*(?-i:Return|Yield|Set|Keep) (?:what|it|them)\b",
        "the noun: 'Return the rights of a client', not 'Return what a client may do'",
    ),
    Pattern(
        "who-subject",
        rf"(?:{_START}|\b(?:to|for|by|as|than|if|with) )who\b{_NO_QUESTION}",
        "the role: 'the client that ...', 'a user who ...'",
    ),
    Pattern("anew", r"\banew\b", "'again'"),
    Pattern("beside", r"\bbeside\b", "'next to', 'with', 'in addition to', 'compared with'"),
    Pattern("amid", r"\bamid(?:st)?\b", "'during', 'in the middle of'"),
    Pattern("lest", r"\blest\b", "'so that ... not', 'otherwise'"),
    Pattern("of-own", r"\bof (?:its|their|our|your|his|her|my|one's) own\b", "'its own ...', 'your own ...'"),
    Pattern("he", r"\b(?-i:[Hh]e|[Hh]is|[Hh]im|[Hh]imself|[Ss]he|[Hh]ers|[Hh]erself)\b", "'they', 'their', 'the user'"),
    Pattern(
        "tell", r"\b(?:tells?|told|telling)\b", "'report', 'show', 'return whether'; 'distinguish' for 'tell apart'"
    ),
    Pattern(
        "give-as-return",
        r"\A\s*gives |\b(?:takes? and gives?|gives? no|gave no|gives? (?:it|them) (?:back|as)|giv(?:es?|ing) back)\b"
        r"|\bwhat (?:[\w.']+ ){1,3}(?:gives?|gave)\b",
        "'return', 'produce', 'output'",
    ),
    Pattern(
        "take-as-accept",
        r"\bwhat (?:it|they|the \w+|a \w+|[\w']+ models?) takes?\b(?! (?:up|over|place|to |long))"
        r"|\btakes? (?:no|only|neither) (?!time\b|longer\b|more\b|less\b|part\b|care\b|"
        r"effect\b|memory\b|lock\b|room\b|seconds?\b|\d)"
        rf"|{_BE} taken (?:as|for) (?!long\b)|\btakes? (?:it |this |that )?for granted\b",
        "'accept', 'treat as', 'assume'; 'takes 3 s' is fine",
    ),
    Pattern(
        "one-a-variant",
        r"\b(?:one|an? (?:scale|value|line|file|mapping|copy|task|thread|call|frame|list|entry|row|sample|number|"
        r"column|reason|process)) an? (?!few\b|lot\b|little\b|time\b|given\b)\w+",
        "'one per variant'",
    ),
    Pattern("come-to", r"\b(?:comes?|came|coming) to\b", "'reach', 'amount to', 'arrive at', 'become'"),
    Pattern("go-on", r"\b(?:goes|go|going|went|gone) on\b(?! to )", "'continue', 'keep ...ing'"),
    Pattern(
        "hold-against", r"\b(?:holds?|held|holding) (?:[\w.{}]+ ){0,3}against\b", "'check against', 'compare with'"
    ),
    Pattern("patience", r"\bpatience\b", "the mechanism: 'close a connection that stopped reading'"),
    Pattern("are-you", r"\bare you\?", "the mechanism: 'a PING frame'"),
    Pattern("mend", r"\bmend(?:s|ed|ing)?\b", "'fix', 'repair'"),
    Pattern("for-ever", r"\bfor ever\b", "'forever', 'without end'"),
    Pattern("else-start", r"(?:\A\s*|[.;]\s+)(?:(?-i:Else)|(?<=;\s)else)(?=[\s,])", "'Otherwise'"),
)
LONG_CELL = Pattern("long-cell", "", f"a list, or a shorter text: cells have at most {MOST_IN_CELL} characters")
_COMPILED = [(pattern, pattern.compile()) for pattern in PATTERNS]


@dataclass(frozen=True)
class Text:
    """A piece of prose and the lines of its file, counted from 1, that it spans."""

    text: str
    first: int
    last: int


@dataclass(frozen=True)
class Finding:
    """One place to reword."""

    path: str
    line: int
    pattern: Pattern
    found: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern.name}: {self.found!r} -> write {self.pattern.instead}"


def _strings(node: ast.AST) -> Iterator[Text]:
    """Yield the strings of more than one word; an f-string is one text, with ``{}`` for each value."""
    text = ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if " " in text.strip() and isinstance(node, ast.expr):
        yield Text(text, node.lineno, node.end_lineno or node.lineno)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _strings(child)


def _comments(source: str) -> Iterator[Text]:
    """Yield comments; lines that follow each other in one column are one text."""
    block: list[str] = []
    end = column = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, start = token.start
        whole = not token.line[:start].strip()
        if block and not (whole and line == end + 1 and start == column):
            yield Text("\n".join(block), end - len(block) + 1, end)
            block = []
        block.append(token.string.lstrip("#! "))
        end, column = line, start if whole else -1
    if block:
        yield Text("\n".join(block), end - len(block) + 1, end)


def _paragraphs(source: str) -> Iterator[Text]:
    """Yield paragraphs, list items and table rows outside fenced blocks."""
    block: list[str] = []
    fenced = False
    lines = source.split("\n")
    for number, line in enumerate([*lines, ""], 1):
        fence = line.lstrip().startswith("```")
        if block and (fence or fenced or not line.strip() or line.lstrip().startswith(("- ", "|", "#"))):
            yield Text("\n".join(block), number - len(block), number - 1)
            block = []
        if fence:
            fenced = not fenced
        elif not fenced and line.strip():
            block.append(re.sub(r"\]\([^)]*\)", "]", line))


def texts(path: Path) -> Iterator[Text]:
    """Yield the prose of a file."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from _strings(ast.parse(source))
        yield from _comments(source)
    else:
        yield from _paragraphs(source)


def _without_code(text: str) -> str:
    return re.sub(r"``.+?``|`[^`\n]+`", lambda match: re.sub(r"\S", "x", match[0]), text, flags=re.DOTALL)


def _long_cells(row: str) -> Iterator[str]:
    """Yield the cells of a row of a table that are too long, without their markup."""
    for cell in re.split(r"(?<!\\)\|", row):
        shown = re.sub(r"[`*\[\]]|<br>", "", cell).strip()
        if len(shown) > MOST_IN_CELL:
            yield shown


def _line(lines: list[str], text: Text, start: int, found: str) -> int:
    """Return the line of a match: by its line breaks, or for a string in several pieces by its first word."""
    if text.text.count("\n") == text.last - text.first:
        return text.first + text.text.count("\n", 0, start)
    words = found.split()
    for number in range(text.first, text.last + 1):
        if " ".join(words[:2]) in lines[number - 1]:
            return number
    return text.first


def check(path: Path, name: str) -> list[Finding]:
    """Return the findings in one file, called ``name`` in them, in the order of its lines."""
    lines = path.read_text().split("\n")
    found = []
    for text in texts(path):
        if any(ACCEPTED in line for line in lines[text.first - 1 : text.last]):
            continue
        if text.text.startswith("|") and name not in GENERATED_TABLES:
            found += [Finding(name, text.first, LONG_CELL, cell[:40]) for cell in _long_cells(text.text)]
        prose = _without_code(text.text)
        for pattern, regex in _COMPILED:
            for match in regex.finditer(prose):
                start = match.start() + re.match(r"[\s.;!-]*", match[0]).end()  # type: ignore[union-attr]
                words = " ".join(text.text[start : match.end() + 25].split())
                found.append(Finding(name, _line(lines, text, start, text.text[start : match.end()]), pattern, words))
    return sorted(found, key=lambda finding: finding.line)


def files(paths: list[str]) -> list[str]:
    """Return the files under ``paths`` that have prose, as git lists them; all of the repository's by default."""
    command = ["git", "--glob-pathspecs", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in set(listed) - SKIPPED if _has_prose(name) and (ROOT / name).is_file())


def _has_prose(name: str) -> bool:
    path = Path(name)
    if path.name.endswith(("_pb2.py", "_pb2_grpc.py")) or "results" in path.parts or path.name == "constraints.txt":
        return False
    return path.suffix in {".py", ".md", ".toml", ".yaml", ".yml"} or path.name in {"Makefile", "Dockerfile", "run"}


def main(arguments: list[str]) -> int:
    """Print the findings; return the exit status."""
    count = "--count" in arguments
    paths = [argument for argument in arguments if not argument.startswith("--")]
    found = [finding for name in files(paths) for finding in check(ROOT / name, name)]
    if count:
        folders = Counter("/".join(Path(finding.path).parts[:2]) for finding in found)
        kinds = Counter(finding.pattern.name for finding in found)
        for name, number in (*sorted(folders.items()), *kinds.most_common(), ("all", len(found))):
            print(f"{number:5} {name}")
    else:
        for finding in found:
            print(finding)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
