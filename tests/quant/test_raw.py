"""Raw data: texts in CSV and JSON Lines, and folders of files by class, of which steps make tensors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument
from ingot.model_store import Archive, Golden
from ingot.model_store.format import goldens
from ingot.quant.data.samples import Samples
from ingot.steps import audio_classification
from tests.server import test_image_steps, test_sound_steps, test_steps
from tests.steps import bert
from tests.support import RunIngot, refused, succeeded

# The model "length" says SHORT up to two words, which the second row here does not say.
ROWS = [("good", "SHORT"), ("a fine film", "SHORT"), ("the story was never dull", "LONG"), ("very bad", "0")]


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def length(tmp_path: Path) -> str:
    test_steps.make(tmp_path).save(tmp_path / "length.ingot")
    return "length.ingot"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_accuracy_of_texts(length: str, tmp_path: Path, run_ingot: RunIngot, suffix: str) -> None:
    """Labels are names or numbers of classes; other columns do not matter."""
    rows = [{"id": index, "text": text, "label": label} for index, (text, label) in enumerate(ROWS)]
    table(tmp_path / f"rows.{suffix}", rows)
    found = json.loads(
        succeeded(run_ingot("compare", length, length, "--data", f"rows.{suffix}", "--batch", "1", "--json"))
    )
    assert found["metric"] == "accuracy:labels=labels,output=logits"
    assert found["score_before"]["value"] == 0.5
    assert found["data"]["evaluation_rows"] == 4


def test_agreement_without_labels(length: str, tmp_path: Path, run_ingot: RunIngot) -> None:
    table(tmp_path / "rows.csv", [{"text": text} for text, _ in ROWS])
    shown = succeeded(run_ingot("compare", length, length, "--data", "rows.csv", "--batch", "1"))
    assert "answers the same" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("words,label\ngood,SHORT\n", "line 2 of rows.csv has no 'text', a raw input of the model; its"),
        ("text,label\ngood,FINE\n", "line 2 of rows.csv has the label 'FINE'; the model's labels are: LONG, SHORT"),
        ("text,label\ngood,2\n", "has the label '2'; the model's labels are: LONG, SHORT"),
        ("text,label\na,b,c\n", "line 2 of rows.csv has more or fewer fields than the header"),
        ("text,label\n", "rows.csv has no rows"),
        (f"text\n{'good ' * 400}\n", "line 2 of rows.csv: element 0 of input 'text' has 2000 characters"),
        (b"text\n\xff\n", "rows.csv cannot be read: 'utf-8' codec"),
    ],
)  # fmt: skip
def test_wrong_tables(length: str, tmp_path: Path, run_ingot: RunIngot, content: str | bytes, message: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in " ".join(refused(run_ingot("compare", length, length, "--data", "rows.csv")).split())


def test_wrong_json_lines(length: str, tmp_path: Path, run_ingot: RunIngot) -> None:
    for content, message in (("{", "line 1 of rows.jsonl is not JSON"), ("[1]", "line 1 of rows.jsonl is a list"),
                             ('{"text": 3}', "line 1 of rows.jsonl: 'text' is 3, not a text")):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(content)
        assert message in refused(run_ingot("compare", length, length, "--data", "rows.jsonl"))


def test_a_model_without_steps_takes_no_raw_data(tmp_path: Path, run_ingot: RunIngot) -> None:
    archive = test_steps.make(tmp_path)
    table(tmp_path / "rows.csv", [{"text": "good"}])
    with pytest.raises(InvalidArgument, match="the model has no steps that make tensors of them"):
        Samples.read(archive.signature, str(tmp_path / "rows.csv"))


def test_a_folder_of_pictures_by_class(tmp_path: Path, run_ingot: RunIngot) -> None:
    """Labels are matched by name: the folders sort otherwise than the model's labels."""
    test_image_steps.make(tmp_path).save(tmp_path / "colour.ingot")
    for number, (label, colour) in enumerate([("red", "red"), ("blue", "blue"), ("green", "lime"), ("green", "red")]):
        (tmp_path / "pictures" / label).mkdir(parents=True, exist_ok=True)
        [content] = test_image_steps.files(colour)
        (tmp_path / "pictures" / label / f"{number}.bin").write_bytes(content)
    ask = ("compare", "colour.ingot", "colour.ingot", "--data", "pictures", "--batch", "1")
    found = json.loads(succeeded(run_ingot(*ask, "--json")))
    assert found["metric"] == "accuracy:labels=labels,output=logits"
    assert found["score_before"]["value"] == 0.75
    (tmp_path / "pictures" / "red" / "0.bin").write_bytes(b"%PDF")
    assert "0.bin: element 0 of input 'image' is not a JPEG" in refused(run_ingot(*ask))
    (tmp_path / "pictures" / "red").rename(tmp_path / "pictures" / "pink")
    assert "has the label 'pink'; the model's labels are: red, green, blue" in refused(run_ingot(*ask))


def test_a_folder_of_sounds_by_class(tmp_path: Path, run_ingot: RunIngot) -> None:
    described = audio_classification(test_sound_steps.LEVELS, rate=test_sound_steps.RATE)
    test_sound_steps.make("level", described, tmp_path, test_sound_steps.sound(0.5))
    for number, level in enumerate((0.5, 0.0, 0.4, 0.01)):
        folder = tmp_path / "sounds" / described.steps.after[0].labels[number % 2]  # type: ignore[union-attr]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.wav").write_bytes(test_sound_steps.sound(level))
    ask = ("compare", "level.ingot", "level.ingot", "--data", "sounds", "--batch", "1")
    found = json.loads(succeeded(run_ingot(*ask, "--json")))
    assert found["metric"] == "accuracy:labels=labels,output=logits"
    assert found["score_before"]["value"] == 1


@pytest.mark.matrix
def test_a_quantized_classifier_keeps_its_steps(tmp_path: Path, run_ingot: RunIngot) -> None:
    bert.save(tmp_path / "net", id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})
    succeeded(run_ingot("export", "net", "-o", "net.ingot"))
    dice = np.random.default_rng(0)
    texts = [" ".join(dice.choice(bert.WORDS[:9], dice.integers(1, 20))) for _ in range(80)]
    table(tmp_path / "rows.csv", [{"text": text, "label": dice.choice(["NEGATIVE", "POSITIVE"])} for text in texts])
    forced = ("--force", "--batch", "1", "-o", "q.ingot")
    quantized = run_ingot("quantize", "net.ingot", "--data", "rows.csv", "--recipe", "static-int8", *forced)
    assert "accuracy:labels=labels,output=logits: " in quantized.stderr
    assert "final answers to the raw goldens, compared with the original's: " in quantized.stderr, quantized.stderr
    original, int8 = (Archive.open(tmp_path / "q.ingot").variant(name) for name in ("fp32", "int8"))
    assert int8.serving.steps == original.serving.steps
    assert int8.step_files() == original.step_files()
    assert [case.raw.keys() for case in int8.goldens()] == [case.raw.keys() for case in original.goldens()]
    assert all(set(case.answers) == {"label", "score", "tokens", "cut_tokens"} for case in int8.goldens() if case.raw)
    with ingot.serve(f"{tmp_path / 'q.ingot'}#int8", http_port=0, grpc_port=0) as running:
        assert running.infer("net", {"text": test_steps.texts("a fine film")})["label"].shape == (1, 2)


@pytest.mark.matrix
def test_pairs_of_an_embedding(tmp_path: Path, run_ingot: RunIngot) -> None:
    bert.sentence_transformer(tmp_path / "st")
    succeeded(run_ingot("export", "st", "-o", "st.ingot"))
    dice = np.random.default_rng(1)
    rows = [
        {"text": " ".join(dice.choice(bert.WORDS[:9], 6)), "text_pair": " ".join(dice.choice(bert.WORDS[:9], 6))}
        for _ in range(40)
    ]
    for index, row in enumerate(rows):
        if index % 2:
            row["text_pair"] = row["text"]
        row["label"] = index % 2  # type: ignore[assignment]  # a number in JSON
    table(tmp_path / "pairs.jsonl", rows)
    compared = run_ingot("compare", "st.ingot", "st.ingot", "--data", "pairs.jsonl", "--batch", "1", "--json")
    found = json.loads(succeeded(compared))
    assert found["metric"] == "pairs"
    assert found["score_before"]["value"] > 0.8  # equal texts have the largest similarity
    assert found["data"]["evaluation_rows"] == 80
    table(tmp_path / "texts.jsonl", [{"text": row["text"]} for row in rows])
    forced = ("--force", "--batch", "1", "-o", "q.ingot")
    quantized = run_ingot("quantize", "st.ingot", "--data", "texts.jsonl", "--recipe", "dynamic-int8", *forced)
    assert "answers: 1.0000 before, 0.9" in quantized.stderr, quantized.stderr
    wanted = refused(run_ingot("compare", "st.ingot", "st.ingot", "--data", "texts.jsonl", "--metric", "pairs"))
    assert "needs texts, a second text and a score in each row" in wanted


def test_recorded_raw_requests(length: str, tmp_path: Path, run_ingot: RunIngot) -> None:
    """The steps make tensors of them, next to requests of tensors; a model without steps refuses them."""
    tensors = {name: np.ones((2, 4), np.int64) for name in ("input_ids", "attention_mask")}
    cases = [Golden({}, {}, {"text": test_steps.texts("good", text)}, {}) for text, _ in ROWS]
    (tmp_path / "traffic").mkdir()
    (tmp_path / "traffic" / "000000.safetensors").write_bytes(goldens.encode([*cases, Golden(tensors, {})]))
    for data in ("traffic", "traffic/000000.safetensors"):
        found = succeeded(run_ingot("compare", length, length, "--data", data, "--batch", "1", "--json"))
        assert json.loads(found)["data"]["evaluation_rows"] == 10
    with pytest.raises(
        InvalidArgument, match=r"request 0 of .*000000.safetensors, has raw inputs, but the model has no"
    ):
        Samples.read(test_steps.SIGNATURE, str(tmp_path / "traffic"))
