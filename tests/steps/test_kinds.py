"""Each kind of step by itself, against the rule that it stands for."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.steps import Steps, image_classification, text_classification
from ingot.steps.after.classify import Classify
from ingot.steps.after.ctc import Ctc
from ingot.steps.after.dense import Dense
from ingot.steps.after.depth import Depth
from ingot.steps.after.entities import Entities
from ingot.steps.after.masks import Masks
from ingot.steps.after.normalize import Normalize
from ingot.steps.after.pool import Pool
from ingot.steps.after.segments import Segments
from ingot.steps.after.text_boxes import TextBoxes
from ingot.steps.growth import growth
from ingot.steps.item import ItemStep
from ingot.steps.pipeline import AnyStep
from ingot.steps.step import Step
from ingot.steps.tokenize import Tokenize
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.steps.bert import tokenizer_file, vocabulary

RANDOM = np.random.default_rng(0)


def run(step: Step, values: Mapping[str, Array], files: Mapping[str, bytes] | None = None) -> Mapping[str, Array]:
    return step.open(lambda name: (files or {})[name])(values)


def texts(*items: str | bytes | int) -> Array:
    array = np.empty(len(items), object)
    array[:] = [item.encode() if isinstance(item, str) else item for item in items]
    return array


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> bytes:
    return tokenizer_file()


def test_unknown_options_are_refused_by_name(tokenizer: bytes) -> None:
    with pytest.raises(InvalidArgument, match="'max_len' is not an option of the task text-classification: kind, file"):
        text_classification(tokenizer, ["a"], max_len=3)


@pytest.mark.parametrize(
    "step", [Masks(labels=("a",)), Segments(labels=("a",)), Depth(), TextBoxes()], ids=lambda step: step.kind
)
def test_the_event_loop_does_not_draw_pictures(step: Step) -> None:
    assert not step.elements_at_once  # few outputs of a graph may be those of a large picture


def test_kinds_override_only_what_steps_have() -> None:
    """A property that the base does not have any longer would be without effect."""
    for kind in get_args(get_args(AnyStep)[0]):
        base = ItemStep if issubclass(kind, ItemStep) else Step
        own = {name for name, value in vars(kind).items() if isinstance(value, property)}
        assert own <= {*dir(base), "count"}, kind  # of Classify, the labels of an answer


class TestTokenize:
    def tokens(self, tokenizer: bytes, values: Mapping[str, Array], **options: Any) -> Mapping[str, Array]:
        return run(Tokenize(**options), values, {"tokenizer.json": tokenizer})

    def test_rows_are_padded_to_the_longest(self, tokenizer: bytes) -> None:
        found = self.tokens(tokenizer, {"text": texts("a film", "a", "")})
        words = vocabulary()
        a, film, first, last = (words.index(word) for word in ("a", "film", "[CLS]", "[SEP]"))
        assert found["input_ids"].tolist() == [[first, a, film, last], [first, a, last, 0], [first, last, 0, 0]]
        assert found["attention_mask"].sum(1).tolist() == found["tokens"].tolist() == [4, 3, 2]
        left = self.tokens(tokenizer, {"text": texts("a film", "a")}, padding_side="left", pad_id=7)
        assert left["input_ids"][1].tolist() == [7, first, a, last]

    def test_cut_tokens_are_counted_or_refused(self, tokenizer: bytes) -> None:
        values = {"text": texts("a", "a film the story was", "a film")}
        found = self.tokens(tokenizer, values, max_length=4)
        assert found["cut_tokens"].tolist() == [0, 3, 0]
        assert found["tokens"].tolist() == [3, 4, 4]
        with pytest.raises(InvalidArgument, match="element 1 of input 'text' has 7 tokens; the model accepts 4"):
            self.tokens(tokenizer, values, max_length=4, overflow="refuse")

    def test_of_a_pair_the_longer_text_is_cut_first(self, tokenizer: bytes) -> None:
        values = {"text": texts("a film the story was"), "text_pair": texts("a a")}
        found = self.tokens(tokenizer, values, max_length=7, pair="text_pair")
        assert found["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]
        assert found["cut_tokens"].tolist() == [3]

    @pytest.mark.parametrize(("pair", "special"), [("", 2), ("text_pair", 3)])
    def test_rows_have_room_for_more_than_special_tokens(self, tokenizer: bytes, pair: str, special: int) -> None:
        words = texts("a film the story was")
        values = {"text": words, **({pair: words} if pair else {})}
        for length in range(1, special + 1):
            with pytest.raises(InvalidArgument, match=f"max_length .* is {length}, .* puts {special} special tokens"):
                self.tokens(tokenizer, values, max_length=length, pair=pair)
        found = self.tokens(tokenizer, values, max_length=special + 1, pair=pair)
        assert found["input_ids"].shape == (1, special + 1)

    def test_prompts_are_put_before_the_texts(self, tokenizer: bytes) -> None:
        options: dict[str, Any] = {"prompts": {"query": "a ", "none": ""}, "default_prompt": "query"}
        plain = self.tokens(tokenizer, {"text": texts("a film", "a a")})["input_ids"].tolist()
        found = self.tokens(tokenizer, {"text": texts("film", "a")}, **options)
        assert found["input_ids"].tolist() == plain
        named = {"text": texts("a film", "a a"), "prompt_name": texts("none")}
        assert self.tokens(tokenizer, named, **options)["input_ids"].tolist() == plain
        with pytest.raises(InvalidArgument, match="'prompt_name' is 'other'; the model's prompts are: query, none"):
            self.tokens(tokenizer, {"text": texts("a"), "prompt_name": texts("other")}, **options)

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            (b"\xff\xfe", "element 1 of input 'text' is not valid UTF-8"),
            (b"\xed\xa0\x80", "element 1 of input 'text' is not valid UTF-8"),  # a lone surrogate
            (7, "element 1 of input 'text' is a int, not a text"),
            ("x" * 101, "element 1 of input 'text' has 101 characters, over the limit of 100"),
        ],
    )
    def test_what_is_not_a_text_is_refused(self, tokenizer: bytes, item: str | bytes | int, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            self.tokens(tokenizer, {"text": texts("a", item)}, max_characters=100)

    def test_long_requests_are_encoded_in_pieces_and_too_long_ones_refused(self, tokenizer: bytes) -> None:
        """Texts of over 65,536 characters are encoded one after the other, with the same result."""
        long = texts("a film " * 12_000, "a", "a fine film " * 8_000, "film")
        found = self.tokens(tokenizer, {"text": long}, max_length=5)
        alone = [self.tokens(tokenizer, {"text": long[[index]]}, max_length=5) for index in range(4)]
        assert found["tokens"].tolist() == [5, 3, 5, 3]
        assert found["cut_tokens"].tolist() == [int(each["cut_tokens"][0]) for each in alone] == [23_997, 0, 23_997, 0]
        for row, each in zip(found["input_ids"], alone, strict=True):
            assert row[: each["tokens"][0]].tolist() == each["input_ids"][0].tolist()
        with pytest.raises(InvalidArgument, match="has 22 characters in all, over the limit of 20; divide"):
            self.tokens(tokenizer, {"text": texts("x" * 11, "y" * 11)}, max_total_characters=20)

    def test_a_damaged_tokenizer(self) -> None:
        with pytest.raises(InvalidArchive, match=r"the tokenizer 'tokenizer\.json' cannot be read"):
            run(Tokenize(), {}, {"tokenizer.json": b"{}"})

    def test_growth_counts_the_strings_of_a_map(self) -> None:
        """Sentencepiece's maps write U+FDFA, a phrase of 18 characters, out."""
        strings = b"\0".join(each.encode() for each in ("a", "\ufdfa", "bc"))
        content = b64encode((4).to_bytes(4, "little") + b"\1\2\3\4" + strings).decode()
        precompiled = {"type": "Precompiled", "precompiled_charsmap": content}
        spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
        declared = {"type": "Sequence", "normalizers": [{"type": "NFKD"}, precompiled, spaces]}
        assert growth(declared) == (18.0, "Precompiled")

    def test_a_default_prompt_that_there_is_not(self) -> None:
        with pytest.raises(ValidationError, match="'x' is not among the prompts"):
            Tokenize(default_prompt="x")


class TestPool:
    tokens = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])

    @pytest.mark.parametrize(
        ("mode", "first"),
        [
            ("cls", tokens[0, 0]),
            ("max", tokens[0, :3].max(0)),
            ("mean", tokens[0, :3].mean(0)),
            ("mean_sqrt_len_tokens", tokens[0, :3].sum(0) / np.sqrt(3)),
            ("weightedmean", (tokens[0, :3] * [[1], [2], [3]]).sum(0) / 6),
            ("lasttoken", tokens[0, 2]),
        ],
    )
    def test_masked_tokens_do_not_count(self, mode: Any, first: Array) -> None:
        found = run(Pool(modes=(mode,)), {"last_hidden_state": self.tokens, "attention_mask": self.mask})["embedding"]
        assert found[0] == pytest.approx(first, rel=1e-6)
        assert found[1] == pytest.approx(self.tokens[1, 0], rel=1e-6)  # of one token, all modes return it
        assert found.dtype == np.float32

    def test_several_are_concatenated(self) -> None:
        values = {"last_hidden_state": self.tokens, "attention_mask": self.mask}
        found = run(Pool(modes=("cls", "max")), values)["embedding"]
        assert found.shape == (2, 6)
        assert (found[:, :3] == self.tokens[:, 0]).all()


class TestVectors:
    def test_a_dense_layer(self) -> None:
        weight, bias, x = (RANDOM.normal(size=size).astype(np.float32) for size in ((2, 3), (2,), (4, 3)))
        files = {}
        for name, array in (("w.npy", weight), ("b.npy", bias)):
            raw = BytesIO()
            np.save(raw, array)
            files[name] = raw.getvalue()
        found = run(Dense(weight="w.npy", bias="b.npy"), {"embedding": x}, files)["embedding"]
        assert found == pytest.approx(np.tanh(x @ weight.T + bias), abs=1e-6)
        with pytest.raises(InvalidArchive, match=r"'b\.npy' holds float32 of 1 dimensions, not float32 of 2"):
            run(Dense(weight="b.npy"), {}, files)
        with pytest.raises(InvalidArchive, match=r"'w\.npy' is not a \.npy file of a plain array"):
            run(Dense(weight="w.npy"), {}, {"w.npy": b"\x80\x04N."})
        np.savez(several := BytesIO(), weight=weight)
        with pytest.raises(InvalidArchive, match=r"'w\.npy' is not a \.npy file of a plain array"):
            run(Dense(weight="w.npy"), {}, {"w.npy": several.getvalue()})

    def test_a_dense_layer_of_another_size(self) -> None:
        file = BytesIO()
        np.save(file, np.ones((2, 3), np.float32))
        with pytest.raises(
            InvalidArchive, match=r"'dense' gets 'embedding' of 4 values, but 'dense\.weight\.npy' has 3 col"
        ):
            run(Dense(), {"embedding": np.ones((1, 4), np.float32)}, {"dense.weight.npy": file.getvalue()})

    def test_normalization(self) -> None:
        found = run(Normalize(), {"embedding": np.array([[3, 4], [0, 0]], np.float32)})["embedding"]
        assert found.tolist() == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("step", [Entities(labels=("O", "A", "B")), Ctc(tokens=("<pad>", "a", "b"))])
def test_each_class_of_a_token_or_frame_needs_a_name(step: Step, count: int, tokenizer: bytes) -> None:
    """Also of a graph whose classes are known only once it has run."""
    values = {"logits": np.zeros((1, 5, count), np.float32), "text": texts("a film")}
    with pytest.raises(InvalidArgument, match=f"has 3 .* but 'logits' has {count}"):
        run(step, values, {"tokenizer.json": tokenizer})


class TestClassify:
    logits = np.array([[1.0, 3.0, 2.0], [1000.0, -1000.0, 0.0]], np.float32)

    def test_the_best_labels_come_first(self) -> None:
        found = run(Classify(labels=("x", "y", "z"), top_k=2), {"logits": self.logits})
        assert found["label"].tolist() == [[b"y", b"z"], [b"x", b"y"]]  # of equal scores the first
        e = np.exp(self.logits[0] - 3)
        assert found["score"][0] == pytest.approx([e[1] / e.sum(), e[2] / e.sum()])

    def test_each_class_needs_a_label(self) -> None:
        with pytest.raises(InvalidArgument, match="has 1 labels, but 'logits' has 3 classes; give one label for each"):
            run(Classify(labels=("x",)), {"logits": self.logits})

    def test_more_than_all_classes(self) -> None:
        for steps in (text_classification(b"", ["x", "y"], top_k=5), image_classification(["x", "y"], top_k=5)):
            assert [spec.shape for spec in steps.steps.outputs[:2]] == [("batch", 2)] * 2

    def test_without_labels_scores_keep_their_order(self) -> None:
        found = run(Classify(function="sigmoid"), {"logits": self.logits})
        assert found["score"][1].tolist() == [1, 0, 0.5]
        single = run(Classify(function="none"), {"logits": self.logits[:, :1]})
        assert single["score"].tolist() == [1, 1000]


class TestSteps:
    signature = Signature(
        (TensorSpec("input_ids", DType.INT64, ("batch", "seq")),), (TensorSpec("logits", DType.FP32, ("batch", 2)),)
    )

    def steps(self, tokenizer: bytes) -> Steps:
        return text_classification(tokenizer, ["no", "yes"]).steps

    def test_from_texts_to_labels(self, tokenizer: bytes) -> None:
        opened = self.steps(tokenizer).open(lambda name: tokenizer, self.signature)

        def graph(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            assert list(inputs) == ["input_ids"]  # the graph has no mask
            return {"logits": np.array([[0, len(row)] for row in inputs["input_ids"]], np.float32)}

        found = opened.run({"text": texts("a film")}, graph)
        assert found["label"].tolist() == [[b"yes", b"no"]]
        assert found["tokens"].tolist() == [4]
        assert found["cut_tokens"].tolist() == [0]

    def test_a_graph_that_needs_more_than_the_steps_make(self, tokenizer: bytes) -> None:
        signature = Signature((TensorSpec("pixels", DType.FP32, ("batch",)),), self.signature.outputs)
        with pytest.raises(InvalidArgument, match="the graph needs 'pixels', which is not among: attention_mask"):
            self.steps(tokenizer).check(signature)
        renamed = Signature(self.signature.inputs, (TensorSpec("scores", DType.FP32, ("batch", 2)),))
        with pytest.raises(InvalidArgument, match="step 'classify' needs 'logits'"):
            self.steps(tokenizer).check(renamed)

    @pytest.mark.parametrize("labels", [["no"], ["no", "perhaps", "yes"]])
    def test_a_graph_with_other_classes(self, tokenizer: bytes, labels: list[str]) -> None:
        with pytest.raises(InvalidArgument, match=f"has {len(labels)} labels, but 'logits' has 2 classes"):
            text_classification(tokenizer, labels).steps.check(self.signature)

    def test_one_raw_input_must_be_required(self, tokenizer: bytes) -> None:
        steps = self.steps(tokenizer).model_copy(update={"optional": ("text", "text_pair", "function_to_apply")})
        with pytest.raises(InvalidArgument, match="have no raw input that a request must have"):
            steps.check(self.signature)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"text": texts()}, "input 'text' is empty"),
            ({"text": texts("a").reshape(1, 1)}, "input 'text' is BYTES of 2 dimensions; send BYTES of 1"),
            ({"text": np.ones(1, np.float32)}, "input 'text' is FP32 of 1 dimensions"),
            ({"text_pair": texts("a")}, "input 'text' is missing; the model's raw inputs are 'text', 'text_pair', "),
            ({"text": texts("a"), "input_ids": np.ones((1, 1))}, "unknown input 'input_ids'; the model's raw inputs"),
            ({"text": texts(*["a"] * 2049)}, "input 'text' has 2049 items, over the limit of 2048"),
            ({"text": texts("a", "b", "c"), "text_pair": texts("a", "b")}, "'text_pair' has 2 items, input 'text' 3"),
            ({"text": texts("a", "b", "c"), "text_pair": texts("a")}, "'text_pair' has 1 items, input 'text' 3"),
        ],
    )
    def test_raw_inputs_that_do_not_fit(self, tokenizer: bytes, values: dict[str, Array], message: str) -> None:
        opened = self.steps(tokenizer).open(lambda name: tokenizer, self.signature)
        with pytest.raises(InvalidArgument, match=message):
            opened.check(values)

    def test_fields_of_other_versions_are_refused(self) -> None:
        with pytest.raises(ValidationError, match=r"'normalize' has no field 'power'; .* export the model again"):
            Normalize.model_validate({"kind": "normalize", "value": "x", "power": 3})
