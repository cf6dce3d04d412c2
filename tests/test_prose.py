"""The lint of wording: each pattern catches its wording and passes plain English that looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prose

# For each pattern: texts that it catches, and texts that it passes.
EXAMPLES = {
    "is-no": (
        ["'x' is no time; write it as 50ms", "they are no\ntensors", "is no number"],
        ["There is no model 'x'.", "It is no longer run and no slower."],
    ),
    "is-none": (
        ["if it is none", "there are rows that are none"],
        ["is None by default", "there is none", "is none of these"],
    ),
    "whoever": (["Whoever answers HTTP calls only this."], ["However it is called."]),
    "nobody": (["Nobody waits."], ["No client waits."]),
    "such-as-subject": (["such as have a batch dimension"], ["names such as x"]),
    "what-subject": (
        ["What would be late is refused.", "Read it. What is known stays."],
        ["What is a route?", "It returns what was read."],
    ),
    "return-what": (["Return what a client may do.", "Yield it."], ["Return the rights.", "return what it reads"]),
    "who-subject": (["Who reads slowly waits.", "a cost to who comes next"], ["a client who waits", "Who is served?"]),
    "anew": (["trains anew"], ["a new model"]),
    "beside": (["a file beside it"], ["besides, it runs"]),
    "amid": (["stops amid a batch"], ["amide"]),
    "lest": (["lest it stops"], ["at least one"]),
    "of-own": (["a process of its own", "a metric of your own"], ["its own process"]),
    "he": (["as he wrote himself", "His model"], ["the head", "HE initialization"]),
    "tell": (["tells whether it runs", "what was told", "cannot be told apart"], ["reports whether it runs"]),
    "give-as-return": (["Gives the rows.", "what the model gives", "gives no answer"], ["Give the model a name."]),
    "take-as-accept": (["what the model takes", "takes no rows", "is taken for JSON"], ["takes 3 s", "takes no time"]),
    "one-a-variant": (["one a variant", "with a scale a row"], ["one at a time", "one per variant", "a row"]),
    "come-to": (["what it comes to"], ["comes from a client"]),
    "go-on": (["it goes on where it was", "going on after 2"], ["moves on to the next"]),
    "hold-against": (["held against the drop", "hold every input against the signature"], ["holds the lock"]),
    "patience": (["lose patience with a client"], ["patient"]),
    "are-you": (["a PING of 'are you?'"], ["if you are"]),
    "mend": (["mended since"], ["recommended", "amended"]),
    "for-ever": (["runs for ever"], ["runs forever"]),
    "else-start": (["Else it waits.", "it runs; else it waits"], ["Otherwise it waits.", "if x: y; else: z"]),
}


def write(folder: Path, text: str, name: str = "page.md") -> list[prose.Finding]:
    path = folder / name
    path.write_text(text)
    return prose.check(path, name)


def test_every_pattern_has_examples() -> None:
    assert list(EXAMPLES) == [pattern.name for pattern in prose.PATTERNS]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pattern_catches_only_its_wording(name: str, tmp_path: Path) -> None:
    caught, passed = EXAMPLES[name]
    for text in caught:
        assert name in {finding.pattern.name for finding in write(tmp_path, text)}, text
        assert name in {finding.pattern.name for finding in write(tmp_path, f'"""{text}"""\n', "module.py")}, text
    for text in passed:
        assert name not in {finding.pattern.name for finding in write(tmp_path, text)}, text


def test_docstrings_comments_messages_and_help_texts_are_read(tmp_path: Path) -> None:
    source = '''"""A module
that is no script."""

# A comment of two lines, whose words are no
# code.
raise ValueError(
    f"{name} "
    "is no name"
)
option = Option(help="Made anew")
print(f"{'; '.join(told)} of {len(x)}")
'''
    found = [(finding.line, finding.pattern.name) for finding in write(tmp_path, source, "module.py")]
    assert found == [(2, "is-no"), (4, "is-no"), (8, "is-no"), (10, "anew")]


def test_code_and_accepted_texts_are_passed_by(tmp_path: Path) -> None:
    page = (
        "Call `tell` and [it](whoever.md).\n\n```text\nnobody\n```\n\nSaid anew. <!-- prose: ok -->\n\n- a\n- nobody\n"
    )
    assert [(finding.line, finding.pattern.name) for finding in write(tmp_path, page)] == [(10, "nobody")]
    source = 'told = "told"\nx = "nobody is here"  # prose: ok\n"""Calls ``tell`` first."""\n'
    assert write(tmp_path, source, "module.py") == []


def test_a_finding_names_the_place_the_words_and_what_to_write(tmp_path: Path) -> None:
    [finding] = write(tmp_path, "It is\ntrained anew today.\n")
    assert str(finding) == "page.md:2: anew: 'anew today.' -> write 'again'"


@pytest.mark.matrix
def test_generated_files_are_left_out_and_the_tree_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    listed = prose.files([])
    assert {"README.md", "Makefile", "ingot/errors.py"} < set(listed)
    assert [name for name in listed if "_pb2" in name or "/results/" in name] == []
    assert prose.main([]) == 0
    assert capsys.readouterr().out == ""


def test_a_long_cell_of_a_table_is_found_and_the_target_of_its_link_does_not_count(tmp_path: Path) -> None:
    rows = f"| a | {'b ' * 50}|\n| [c]({'d' * 90}.md) | `{'e' * 70}` |\n"
    (finding,) = write(tmp_path, f"| | |\n|---|---|\n{rows}\n```text\n| {'f ' * 50}|\n```\n")
    assert (finding.line, finding.pattern.name) == (3, "long-cell")
