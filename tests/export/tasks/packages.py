"""Prints the answers of rapidocr-onnxruntime and magika to the files of a folder, as JSON."""

import json
import sys
from pathlib import Path

import magika
import numpy
import rapidocr_onnxruntime
from rapidocr_onnxruntime import RapidOCR

folder = Path(sys.argv[1])
ocr = RapidOCR()
# A batch of several lines is extended to the widest, which changes some texts.
alone = RapidOCR(rec_batch_num=1, cls_batch_num=1, text_score=0)


def files(name):
    return {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}


def boxes(content):
    """The boxes of the detector in the order of the package, with the scores that it drops."""
    picture, detector = ocr.load_img(content), ocr.text_det
    prepared = detector.get_preprocess(max(picture.shape[:2]))(picture)
    found = zip(*detector.postprocess_op(detector.infer(prepared)[0], picture.shape[:2]), strict=True)
    kept = [(detector.filter_tag_det_res([box], picture.shape[:2]), score) for box, score in found]
    scores = {box[0].tobytes(): float(score) for box, score in kept if len(box)}
    boxes = [box[0] for box, _ in kept if len(box)]
    ordered = ocr.sorted_boxes(numpy.array(boxes)) if boxes else []
    whole = ocr(content, use_cls=False, use_rec=False)[0]
    return [[box.tolist() for box in ordered], [scores[box.tobytes()] for box in ordered], whole or []]


def texts(content):
    [[text, score]] = ocr.text_rec(ocr.load_img(content))[0]
    return text, float(score)


def directions(content):
    [[label, score]] = ocr.text_cls(ocr.load_img(content))[1]
    return label, float(score)


def reads(content):
    """The corners, text and score of each line of a page."""
    found, _ = alone(content)
    return [[corners, text, float(score)] for corners, text, score in found or []]


def types(content):
    found = MAGIKA.identify_bytes(content)
    return str(found.output.label), found.score


MAGIKA = magika.Magika()
QUESTIONS = {
    "texts": (texts, "lines"),
    "directions": (directions, "lines"),
    "boxes": (boxes, "pages"),
    "reads": (reads, "pages"),
    "types": (types, "files"),
}
answers = {
    name: {file: ask(content) for file, content in files(kind).items()} for name, (ask, kind) in QUESTIONS.items()
}
ocr_models = Path(rapidocr_onnxruntime.__file__).parent / "models"
folders = {"ocr": str(ocr_models), "magika": str(Path(magika.__file__).parent / "models" / MAGIKA.get_model_name())}
json.dump({**answers, "folders": folders}, sys.stdout)
