"""Files of many types on which the steps of an export are proved."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zipfile
from collections.abc import Iterator

import numpy as np

_SENTENCES = "The tide was out. Gulls walked along the wet sand, and it rained for a while.\n"
_TEXTS = (
    "import os\n\n\ndef main():\n    for name in os.listdir('.'):\n        print(name)\n",
    '#include <stdio.h>\n\nint main(void) {\n  printf("hello\\n");\n  return 0;\n}\n',
    "<!DOCTYPE html>\n<html><head><title>A page</title></head><body><p>Hello</p></body></html>\n",
    "# Title\n\nA list:\n\n- one\n- two\n\n```bash\nls\n```\n",
    "SELECT name, count(*) FROM people WHERE age > 30 GROUP BY name;\n",
    "name,age,city\nAda,36,London\nGrace,85,Arlington\n",
    '[server]\nport = 8000\nname = "first"\n',
    'package main\n\nimport "fmt"\n\nfunc main() {\n\tfmt.Println("hello")\n}\n',
    _SENTENCES,
    "Größe, naïve café, 東京, Ελλάδα, и ещё немного текста\n",
)


def sample_files() -> Iterator[bytes]:
    """Yield files of many types and lengths, with white space at their ends, and such that no model needs to see."""
    yield from (b"", b"a", b"\xff", b"  \n\t ", b"\x00" * 7, b" " * 9 + b"abcdefg", b"\n" * 5000 + b"x")
    random = np.random.default_rng(0)
    for text, times in itertools.product(_TEXTS, (1, 8, 200)):
        yield b" \n" * (times % 5) + (text * times).encode() + b"\t\n" * (times % 3)
    for size in (9, 1000, 1030, 5000):
        yield random.integers(0, 256, size, np.uint8).tobytes()
    yield json.dumps({"name": "Ada", "values": [*range(400)]}).encode()
    yield gzip.compress(_SENTENCES.encode() * 50, mtime=0)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a.txt"), _SENTENCES * 90)
    yield file.getvalue()
