"""Deadlines, limits and pauses use the monotonic clock, so that setting the machine's clock changes none of them."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

# Each reads the date: what it is for.
DATES = {
    "server/http/responses.py": "the header Date",
    "client/http.py": "a Retry-After that is a date",
    "server/access/gate.py": "expiry of keys, tokens and certificates",
    "server/access/audit.py": "times of lines",
    "server/observation/spans.py": "times of spans",
    "runtime/dispatch/statistics.py": "the time of the last request, for display",
    "runtime/dispatch/response_cache.py": "the same, of a request answered from the cache",
    "serving/deployment.py": "times of changes, for display",
    "server/plane/apis/completing.py": "when an answer was made, as OpenAI's have it",
    "steps/completion/chat_template.py": "the date in a prompt, for templates that ask for it",
    "serving/pipelines/pipeline.py": "the time of the last request, for display",
    "server/torchserve/versions.py": "when a version was loaded, for display",
    "model_store/format/evidence.py": "when an archive was made",
    "model_store/store/gc.py": "ages of files",
    "model_store/store/tags.py": "times in the log of a tag",
    "cli/server/keys.py": "the expiry of new keys",
    "cli/server/top.py": "how long a server has run, for display",
}
READS = re.compile(r"\btime\.time(?:_ns)?\(|\bdatetime\.(?:now|utcnow|today)\(|\bdate\.today\(|\bCLOCK_REALTIME\b")


@pytest.mark.matrix
def test_only_what_needs_the_date_reads_the_clock() -> None:
    """By the source: a test that sets the clock would need a machine that lets it."""
    found = {
        str(path.relative_to(ROOT / "ingot"))
        for path in (ROOT / "ingot").rglob("*.py")
        if READS.search(path.read_text())
    }
    assert found == set(DATES)
