from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ingot.errors import InvalidArchive
from ingot.model_store import Agreement, BatchLatency
from ingot.model_store.format import manifest
from ingot.quant import metric
from ingot.quant.report import comparison
from ingot.quant.report.records import Audit, Candidate, DataRecord, Layer, ModelComparison, Report, Score, Side
from ingot.quant.report.view import html, text
from ingot.report.axes import Axis
from tests.support import Page


def score(value: float, half: float = 0.004) -> Score:
    return Score(value=value, low=value - half, high=value + half)


def latency(factor: float = 1.0) -> tuple[BatchLatency, ...]:
    return tuple(BatchLatency(rows=rows, seconds=factor * 0.01 * rows) for rows in (1, 8, 32))


def candidate(name: str, speedup: float, drop: float, **changes: Any) -> Candidate:
    return Candidate(
        name=name,
        recipe={"name": name, "version": 1, "keep": [f"{name}.head"]},
        size=1 << 20,
        latency=latency(1 / speedup),
        speedups=dict.fromkeys((1, 8, 32), speedup),
        score=score(0.985 - drop),
        drop=score(drop, 0.002),
        **{"holds": drop <= 0.005, **changes},
    )


def layer(name: str, sqnr: float | None, scheme: str = "static int8", **changes: Any) -> Layer:
    return Layer(name=name, operator="Conv", scheme=scheme, sqnr=sqnr, **changes)


REPORT = Report(
    model="digits",
    variant="int8",
    created="2026-01-02T03:04:05Z",
    machine="x86_64, some CPU",
    versions={"onnxruntime": "1.31.1"},
    data=DataRecord(
        digest="sha256:" + "ab" * 32, source="digits.npz", calibration_rows=200, evaluation_rows=613, held_out=True
    ),
    metric="accuracy:labels=y",
    budget=0.005,
    before=score(0.985),
    after=score(0.982),
    drop=score(0.003, 0.002),
    threads=7,
    size=4 << 20,
    baseline=latency(),
    candidates=(
        candidate("static-int8", 3.5, 0.02, rejected="0.02 worse"),
        candidate("static-kept", 3.0, 0.003, chosen=True),
        candidate("dynamic-int8", 1.5, 0.001),
        candidate("useless", 3.6, 0.9, rejected="wrong"),
        Candidate(name="never-ran", rejected="needs a GPU"),
    ),
    layers=(
        layer("stem.conv", 31.25, low=-1.5, high=2.5, clipped=0.0123),
        layer("body.conv", 8.5, "float", rank=1),
        layer("head.linear", None, "dynamic int8"),
    ),
    audit=Audit(quantized={"QLinearConv": 20, "QGemm": 2}, floats=("Conv body.conv",)),
    outputs=(Agreement(tensor="logits", cosine=0.9987, error=0.013, top1=0.991, sqnr=27.5),),
    notes=("the last rows were left out",),
)


def test_records_survive_json() -> None:
    raw = manifest.encode(REPORT)
    assert manifest.decode(Report, raw, "quantization.json") == REPORT
    assert json.loads(raw)["candidates"][0]["speedups"] == {"1": 3.5, "8": 3.5, "32": 3.5}


@pytest.mark.parametrize(
    "damage",
    [
        {"budget": float("nan")},
        {"budget": 1e200},
        {"size": -1},
        {"baseline": [{"rows": 1, "seconds": 0}]},
        {"baseline": [{"rows": 1 << 70, "seconds": 1}]},
        {"before": {"value": 1, "low": float("-inf"), "high": 2}},
        {"outputs": [{"tensor": "y", "cosine": 1e300, "error": 0}]},
        {"schema_version": 2},
    ],
)
def test_unusable_figures_are_refused(damage: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", **damage}).encode()
    with pytest.raises(InvalidArchive, match="the report is not valid at"):
        manifest.decode(Report, raw, "the report")


def test_a_score_without_a_value_is_blank_and_one_without_an_interval_is_a_number() -> None:
    nan = float("nan")
    assert Score.of(metric.Score(nan, 0, 1)) is None
    assert Score.of(metric.Score(0.5, nan, 1)) == Score(value=0.5, low=0.5, high=1)
    with pytest.raises(ValidationError):
        Score(value=nan, low=0, high=1)


SAID = [
    ("digits#int8", "2026-01-02T03:04:05Z", "x86_64, some CPU", "onnxruntime 1.31.1", "sha256:abab"),
    ("digits.npz; 200 rows for calibration; 613 rows for the metric, none of them among those", "accuracy:labels=y"),
    ("0.9850 [0.9810, 0.9890]", "0.9820 [0.9780, 0.9860]", "0.0030 [0.0010, 0.0050]", "0.0050"),
    ("static-int8", "static-kept", "dynamic-int8", "never-ran", "0.02 worse", "needs a GPU", "chosen"),
    ("3.00x", "1 MiB", "0.9987", "27.5 dB", "99.10%", "1.3e-02"),
    ("stem.conv", "body.conv", "8.5 dB", "31.2 dB", "1.23%", "float"),
    ("QLinearConv", "20", "Conv body.conv", "the last rows were left out"),
]


@pytest.mark.parametrize("shown", [text(REPORT), Page(html(REPORT)).text], ids=["text", "html"])
def test_measurements_are_shown(shown: str) -> None:
    assert [part for parts in SAID for part in parts if part not in shown] == []


def test_one_sentence_explains_the_choice() -> None:
    sentence = (
        "static-kept is the fastest of the 2 that are within the budget and faster than the original, of 5 candidates: "
        "3.00 times as fast as the original "
        "(geometric mean over the batches 1, 8, 32); 1 MiB instead of 4 MiB; accuracy:labels=y is 0.0030 worse "
        "(95 % interval 0.0010 to 0.0050) where 0.0050 is allowed."
    )
    assert sentence in text(REPORT)
    assert sentence in Page(html(REPORT)).text


@pytest.mark.parametrize(
    ("candidates", "sentence"),
    [
        ([candidate("slow", 0.9, 0.001)], "slow was tried; the model is unchanged."),
        ([candidate("a", 3, 0.4), candidate("b", 2, 0.1)], "2 candidates were tried; the model is unchanged."),
        ([candidate("a", 3, 0.4, chosen=True)], "a was kept although it exceeds the budget: 3.00 times"),
        (
            [candidate("a", 3, -0.01, chosen=True)],
            "accuracy:labels=y is 0.0100 better (95 % interval 0.0080 to 0.0120)",
        ),
        ([candidate("a", 3, 0, chosen=True)], "is unchanged (95 % interval -0.0020 to 0.0020) where 0.0050 is allowed"),
        ([], "Nothing was tried; the model is unchanged."),
    ],
)
def test_other_results_in_a_sentence(candidates: list[Candidate], sentence: str) -> None:
    assert sentence in text(REPORT.model_copy(update={"candidates": tuple(candidates)}))


@pytest.mark.parametrize(
    ("verdict", "reason", "candidates", "sentence"),
    [
        ("nothing faster", "it is <slow>", (), "Nothing was tried; the model is unchanged: it is <slow>."),
        # Within the budget, but the verdict is not computed again.
        (
            "budget broken",
            "all lose",
            (candidate("a", 3, 0.001),),
            "a was tried; the model is unchanged: all lose.",
        ),
        (
            "quantized",
            "loses 1",
            (candidate("a", 3, 0.001, chosen=True),),
            "a was kept although it loses 1: 3.00 times",
        ),
    ],
)
def test_the_verdict_matches_the_report(
    verdict: str, reason: str, candidates: tuple[Candidate, ...], sentence: str
) -> None:
    report = REPORT.model_copy(update={"verdict": verdict, "reason": reason, "candidates": candidates})
    assert sentence in text(report)
    assert sentence in Page(html(report)).text


def test_a_report_from_before_there_were_verdicts_is_of_a_variant() -> None:
    older = json.loads(manifest.encode(REPORT))
    del older["verdict"], older["reason"]
    assert manifest.decode(Report, json.dumps(older).encode(), "quantization.json").verdict == "quantized"


def test_candidates_have_one_order_and_one_reason_in_every_form() -> None:
    names = ["useless", "static-int8", "static-kept", "dynamic-int8", "never-ran"]
    reasons = ["wrong", "0.02 worse", "chosen", "within the budget", "needs a GPU"]
    lines = text(REPORT).partition("Candidates\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in lines] == names
    assert all(line.endswith(reason) for line, reason in zip(lines, reasons, strict=True))
    rows = re.findall(r"<tr><td[^>]*><b>([^<]*)</b></td><td>(.*?)</td>", html(REPORT))
    assert [name for name, _ in rows] == names
    shown = [re.sub(r"<[^>]*>|&#\d+;", "", state).removeprefix(" refused").strip() for _, state in rows]
    assert shown == reasons


def test_candidates_that_are_refused_by_their_speed_are_not_counted() -> None:
    slow = [candidate(f"slow-{index}", 0.9, 0.001, rejected="not faster than the original") for index in range(11)]
    shown = text(REPORT.model_copy(update={"candidates": (candidate("fast", 2, 0.001, chosen=True), *slow)}))
    assert "fast is the only one of 12 candidates that is within the budget and faster than the original: 2.00" in shown


def test_many_equal_scores_are_bars_of_speeds() -> None:
    """Their points and names would overlap on one line."""
    equal = [candidate(f"plan-{index}", 1 + index / 10, 0) for index in range(11)]
    equal += [candidate("fast", 3, 0, chosen=True), candidate("slow", 0.9, 0, rejected="not faster than the original")]
    page = html(REPORT.model_copy(update={"candidates": tuple(equal)}))
    assert "many candidates have the same score" in page
    names = [f"plan-{index}" for index in range(11)]
    assert all(Page(page).text.count(name) > 2 for name in [*names, "fast", "slow"])  # in both drawings, and the table
    assert "3.00x, 0.9850, chosen" in page
    assert "0.90x, 0.9850, refused" in page


def test_the_frontier_distinguishes_chosen_and_refused() -> None:
    page = Page(broad(html(REPORT)))
    assert page.count("circle", "chosen") == 1 + 4  # the frontier; three batches of the latency curve and its legend
    assert page.count("circle", "held") == 1
    assert page.count("circle", "refused") == 1
    assert page.count("path", "refused") == 1  # far below: at the edge, with its value
    assert page.count("line", "limit") == 1
    assert "useless (0.085)" in page.words


def broad(page: str) -> str:
    """Return a page without its drawings for narrow screens."""
    return re.sub('<div class="narrow">.*?</div>', "", page)


def places(page: str, kind: str) -> Iterable[tuple[float, float]]:
    for tag, found in Page(broad(page)).seen:
        if tag == "circle" and found["class"] == kind:
            yield float(found["cx"] or 0), float(found["cy"] or 0)


def test_faster_points_are_further_left_and_worse_ones_lower_for_any_metric() -> None:
    def errors(item: Candidate) -> Candidate:
        assert item.drop is not None
        return item.model_copy(update={"score": score(0.1 + item.drop.value)})

    lower = REPORT.model_copy(
        update={"before": score(0.1), "candidates": tuple(errors(item) for item in REPORT.candidates[:3])}
    )
    for report in (REPORT, lower):
        (refused,), (held,) = places(html(report), "refused"), places(html(report), "held")
        assert refused[0] < held[0]
        assert refused[1] > held[1]
    assert "lower is better" in html(lower)
    assert "lower is better" not in html(REPORT)


def test_each_layer_has_its_bar_and_float_ones_are_hollow() -> None:
    layers = tuple(layer(f"block{number}.conv", number % 40 - 2.0) for number in range(100))
    page = Page(broad(html(REPORT.model_copy(update={"layers": layers}))))
    assert page.count("rect", "c0") == 100 + 1  # and the legend
    assert "100 layers" in page.words  # the table is folded
    page = Page(broad(html(REPORT)))
    assert page.count("rect", "hollow") == 1 + 1
    assert "8.5 dB  #1" in page.words


def test_a_bare_report_is_shown_without_what_it_lacks() -> None:
    bare = Report(model="bare")
    page = Page(html(bare))
    assert "bare" in text(bare)
    assert not any(tag == "table" for tag, _ in page.seen)
    assert not any(attributes.get("class") == "plot" for _, attributes in page.seen)


@pytest.mark.parametrize("value", [0.0, 1e-300, -1e149, 1e149, 5e-324])
def test_any_values_can_be_drawn(value: float) -> None:
    extreme = Score(value=value, low=-1e149, high=1e149)
    odd = Candidate(
        name="odd",
        latency=(BatchLatency(rows=0, seconds=9e8), BatchLatency(rows=(1 << 63) - 1, seconds=2e-12)),
        speedups={0: -1.0, 1: value},
        score=extreme,
        drop=extreme,
        chosen=True,
    )
    report = Report(
        model="m",
        before=Score(value=1e149, low=0, high=0),
        budget=value,
        size=1,
        baseline=odd.latency,
        candidates=(odd, odd),
        layers=(layer("a", value), layer("b", -1e149)),
    )
    assert "odd" in text(report)
    assert "odd" in Page(html(report)).text


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\" ' & </style></title>"


def hostile(record: Any) -> Any:
    """Return a report with hostile content in every text."""
    match record:
        case BaseModel():
            names = type(record).model_fields
            return record.model_copy(update={name: hostile(getattr(record, name)) for name in names})
        case dict():
            return {f"{HOSTILE}{key}" if isinstance(key, str) else key: hostile(item) for key, item in record.items()}
        case tuple():
            return tuple(map(hostile, record))
        case str():
            return f"{HOSTILE}{record}"
        case _:
            return record


COMPARISON = ModelComparison(
    model="digits",
    before=Side(archive="a.ingot", variant="fp32", format="onnx", size=4 << 20, latency=latency()),
    after=Side(archive="b.ingot", variant="int8", format="onnx", size=1 << 20, latency=latency(0.5)),
    data=DataRecord(digest="sha256:" + "cd" * 32, source="val.npz", evaluation_rows=613),
    metric="accuracy:labels=y",
    score_before=score(0.985),
    score_after=score(0.982),
    drop=score(0.003, 0.002),
    outputs=REPORT.outputs,
    threads=7,
    machine="x86_64, some CPU",
    created="2026-01-02T03:04:05Z",
    versions={"onnxruntime": "1.31.1"},
    notes=("a note",),
)


@pytest.mark.parametrize(
    ("clean", "dirty"),
    [
        (html(REPORT), html(hostile(REPORT))),
        (comparison.html(COMPARISON), comparison.html(hostile(COMPARISON))),
    ],
    ids=["report", "comparison"],
)
def test_hostile_names_stay_text(clean: str, dirty: str) -> None:
    page = Page(dirty)
    assert {tag for tag, _ in page.seen} == {tag for tag, _ in Page(clean).seen}
    assert not {tag for tag, _ in page.seen} & {"script", "img"}
    assert page.text.count("<script>alert(1)</script>") > 10
    assert not any("onerror" in attributes for _, attributes in page.seen)


def test_the_page_is_self_contained() -> None:
    for page in (html(REPORT), comparison.html(COMPARISON)):
        assert not re.search(r"https?:|url\(|@import|src=|href=", page)
        policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
        assert ("meta", policy) in Page(page).seen


@pytest.mark.parametrize("shown", [comparison.text(COMPARISON), Page(comparison.html(COMPARISON)).text])
def test_a_comparison_shows_both_sides(shown: str) -> None:
    sentence = (
        "b.ingot#int8 against a.ingot#fp32: 2.00 times as fast, 0.25 times the size, accuracy:labels=y 0.0030 worse."
    )
    for part in (sentence, "0.9850 [0.9810, 0.9890]", "27.5 dB", "10.00 ms", "2.00x", "val.npz, 613 rows", "a note"):
        assert part in shown


def test_a_change_within_its_interval_may_be_chance() -> None:
    def said(drop: Score) -> str:
        return comparison.text(COMPARISON.model_copy(update={"drop": drop})).split("\n")[0]

    assert said(score(0.001, 0.002)).endswith("0.0010 worse (which may be chance).")
    assert said(score(-0.1)).endswith("0.1000 better.")
    assert said(score(0.0)).endswith("accuracy:labels=y the same.")


@pytest.mark.parametrize(
    ("values", "log", "texts"),
    [
        ([0.97, 0.985], False, ["0.970", "0.975", "0.980", "0.985"]),
        ([3.0, 3.0], False, ["2.9", "3.0", "3.1"]),
        ([1, 32], True, ["1", "2", "5", "10", "20", "50"]),
        ([1e-6, 1e9], True, None),
    ],
)
def test_ticks_are_round_and_few(values: list[float], log: bool, texts: list[str] | None) -> None:
    axis = Axis.over(values, 0, 100, log=log)
    ticks = axis.ticks()
    assert texts is None or set(texts) >= {text for _, text in ticks}
    assert 2 <= len(ticks) <= 9
    assert all(0 <= axis.at(value) <= 100 for value, _ in ticks)
    assert axis.at(min(values)) <= axis.at(max(values))
