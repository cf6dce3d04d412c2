"""``ingot config``: problems with their lines, where values come from, the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import ROOT, RunIngot, refused, succeeded

GOOD = """\
[server]
http_port = 8000
max_queue = 1000

[[model]]
name = "digits"
source = "digits:prod"
device = "cpu"
instances = 2
slo = "50ms"
"""
BAD = """\
[server]
http_port = "8000"
max_qeue = 1000
drain_timeout = 30
max_delay = 5
[[model]]
name = "-digits"
source = "other=digits:prod"
device = "gpu"
grpc_port = 1
allow_code = 1
[[model]]
slo = "50 fortnights"
[modle]
"""
PROBLEMS = """\
ingot.toml:2: http_port is '8000': it must be a whole number, at least 0 and at most 65535
ingot.toml:3: unknown key 'max_qeue'; did you mean max_queue?
ingot.toml:5: max_delay is 5: write a unit: 5ms or 5s
ingot.toml:7: name is '-digits': it must be letters, digits, '.', '_' and '-', from a letter or digit
ingot.toml:8: source is 'other=digits:prod': write name = "other" and source = "digits:prod"
ingot.toml:9: device is 'gpu': it must be auto, cpu, cuda, or cuda:0,1 with the indices of GPUs
ingot.toml:10: unknown key 'grpc_port' in [[model]]; grpc_port is a setting of the server: write it below [server]
ingot.toml:11: allow_code is 1: it must be true or false
ingot.toml:12: the model has no source; add one: source = "digits:1"
ingot.toml:13: slo is '50 fortnights': not a duration; write it as 50ms, 90s, 5m or 1h
ingot.toml:14: unknown key 'modle'; did you mean [[model]]?
"""


def test_a_good_file_is_ok_and_shown_with_where_each_value_comes_from(
    run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ingot.toml").write_text(GOOD)
    assert succeeded(run_ingot("config", "check")) == "ingot.toml: ok, 2 settings and 1 model\n"
    monkeypatch.setenv("INGOT_MAX_BATCH", "16")
    shown = succeeded(run_ingot("config", "show", "--config", "ingot.toml", "--http-port", "9000", "--slo", "1s"))
    found = {line.split()[0]: line.split()[1:] for line in shown.partition("\n\n")[0].splitlines()}
    assert found["http_port"] == ["9000", "--http-port"]
    assert found["max_batch"] == ["16", "INGOT_MAX_BATCH"]
    assert found["max_queue"] == ["1000", "ingot.toml:3"]
    assert found["slo"] == ["1s", "--slo"]
    assert found["grpc_port"] == ["8001", "default"]
    own = [line.split() for line in shown.partition("\n\n")[2].splitlines()]
    assert own[0] == ["model", "digits=digits:prod", "ingot.toml:5"]
    assert own[1:] == [
        ["device", "cpu", "ingot.toml:8"],
        ["instances", "2", "ingot.toml:9"],
        ["slo", "50ms", "ingot.toml:10"],
    ]
    described = json.loads(succeeded(run_ingot("config", "show", "--config", "ingot.toml", "--json")))
    model = described["models"][0]["settings"]
    assert model["instances"] == {"value": 2, "from": "ingot.toml:9"}
    assert model["max_batch"] == {"value": 16, "from": "server"}
    assert described["settings"]["instances"] == {"value": 1, "from": "default"}


def test_all_problems_are_listed_with_their_lines(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "ingot.toml").write_text(BAD)
    result = run_ingot("config", "check", "ingot.toml")
    assert (result.returncode, result.stdout) == (1, PROBLEMS)
    result = run_ingot("config", "check", "--json")
    assert json.loads(result.stdout) == {"ok": False, "problems": PROBLEMS.splitlines()}
    first = PROBLEMS.splitlines()[0]
    message = refused(run_ingot("config", "show", "--config", "ingot.toml"))
    assert message == f"{first} (and 10 more; ingot config check lists them)"


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server\n", "ingot.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1"),
        ("server = 5\n", "ingot.toml:1: write the server's settings as a table: [server]"),
        ('[model]\nsource = "a:1"\n', "ingot.toml:1: write a model as a table with two brackets: [[model]]"),
        (
            "max_queue = 5\n",
            "ingot.toml:1: unknown key 'max_queue'; max_queue is a setting of the server: write it below",
        ),
        ("[server]\nqzxj = 5\n", "ingot.toml:2: unknown key 'qzxj'; there are: host, http_port"),
        ("[server]\nhttp_port = 80\ngrpc_port = 80", "ingot.toml:2: http_port and ingot.toml:3: grpc_port are both 80"),
        ('[server]\nhost = "0.0.0.0"\n', "ingot.toml:2: host is 0.0.0.0, which other machines may reach"),
        (
            '[[model]]\nsource = "a:1"\n[[model]]\nsource = "a:1"\n',
            "ingot.toml:3: a:1 is already the model of ingot.to",
        ),
        (
            "[server]\nhttp_port = 1_000_000\n",
            "ingot.toml:2: http_port is 1000000: it must be a whole number, at least 0",
        ),
    ],
)
def test_a_problem_names_its_remedy(run_ingot: RunIngot, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "ingot.toml").write_text(text)
    result = run_ingot("config", "check")
    assert result.returncode == 1
    assert result.stdout.startswith(says)
    assert refused(run_ingot("config", "show", "--config", "ingot.toml")).startswith(says)


@pytest.mark.matrix
def test_a_file_that_does_not_exist(run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(run_ingot("config", "check")) == "there is no file ingot.toml"
    assert refused(run_ingot("config", "show", "--config", "other.toml")) == "there is no file other.toml"
    monkeypatch.setenv("INGOT_CONFIG", "third.toml")
    assert refused(run_ingot("config", "show")) == "there is no file third.toml"


@pytest.mark.matrix
def test_the_schema_is_that_of_the_docs_and_accepts_the_file(run_ingot: RunIngot) -> None:
    schema = succeeded(run_ingot("config", "schema"))
    assert schema == (ROOT / "docs" / "reference" / "ingot.schema.json").read_text()
    import jsonschema  # takes a second of each worker that only collects

    jsonschema.Draft202012Validator.check_schema(json.loads(schema))


def test_changes_from_another_file(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(GOOD)
    (tmp_path / "ingot.toml").write_text(GOOD.replace("8000", "8080").replace("instances = 2", "instances = 3"))
    shown = succeeded(run_ingot("config", "check", "--against", "old.toml")).splitlines()
    live, restart = "load digits=digits:prod again: instances: 2 -> 3", "http_port: 8000 -> 8080"
    assert shown[1:] == [f"live: {live}", f"restart: {restart}"]
    described = json.loads(succeeded(run_ingot("config", "check", "--against", "old.toml", "--json")))
    assert described == {
        "ok": True,
        "models": 1,
        "pipelines": 0,
        "live": [live],
        "restart": ["http_port: 8000 -> 8080"],
    }
