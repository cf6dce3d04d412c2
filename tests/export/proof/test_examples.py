from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ingot.errors import ExportError, InvalidArgument, RejectedInputs
from ingot.export.proof.examples import Examples, infer_specs
from ingot.export.proof.indices import proved
from ingot.tensors import Array, DType, Range, parse_spec, values


def examples(*texts: str, **given: object) -> Examples:
    parsed = [parse_spec(text) for text in texts]
    ranges = {name: bounds for _, stated in parsed for name, bounds in stated.items()}
    arrays = {name: np.asarray(value) for name, value in given.items()}
    return Examples([spec for spec, _ in parsed], ranges, arrays or None)


def test_named_dimensions_get_distinct_sizes() -> None:
    sizes = examples("a:float32[batch,seq,4]", "b:float32[batch,width]").default_sizes
    assert list(sizes) == ["batch", "seq", "width"]
    assert len(set(sizes.values())) == 3
    assert min(sizes.values()) >= 2


def test_ranges_are_kept_in_every_case() -> None:
    made = examples("a:float32[batch=4..6,seq=1..2]")
    cases = list(made.cases())
    assert all(sizes["batch"] in Range(4, 6) and sizes["seq"] in Range(1, 2) for sizes in cases)
    assert {sizes["batch"] for sizes in cases} == {4, 6}
    assert {sizes["seq"] for sizes in cases} == {1, 2}
    assert all(cases.count(case) == 1 for case in cases if case != made.default_sizes)


def test_one_row_and_many_are_among_the_cases() -> None:
    assert {case["batch"] for case in examples("a:float32[batch]").cases()} >= {1, 2, 9}


def test_a_fixed_shape_is_proved_with_several_values() -> None:
    made = examples("a:float32[3,4]")
    assert list(made.cases()) == [{}, {}, {}]
    assert not np.array_equal(made.make({}, 0)["a"], made.make({}, 1)["a"])


@pytest.mark.parametrize("dtype", list(DType))
def test_generated_inputs_have_the_type_and_shape(dtype: DType) -> None:
    made = examples(f"a:{dtype.torch_name}[batch,5]", f"s:{dtype.torch_name}[]").make({"batch": 3})
    assert DType.of(made["a"]) is dtype
    assert made["a"].shape == (3, 5)
    assert made["s"].shape == ()


def test_generated_integers_are_valid_indices_and_no_mask_is_empty() -> None:
    array = examples("a:int64[batch,64]").make({"batch": 8})["a"]
    assert set(np.unique(array)) == {0, 1}
    assert array.any(axis=1).all()


def test_the_seed_makes_the_inputs() -> None:
    made = examples("a:float32[batch,5]")
    first, again, other = (made.make({"batch": 2}, seed)["a"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_given_inputs_are_cut_and_repeated_with_variation() -> None:
    made = examples("a:float32[batch,2]", "ids:int64[batch]", a=np.array([[1, 2], [3, 4]], np.float32), ids=[7, 8])
    cut, grown = made.make({"batch": 1}), made.make({"batch": 5})
    assert cut["a"].tolist() == [[1, 2]]
    assert sorted(grown["ids"].tolist()) == [7, 7, 7, 8, 8]
    assert grown["a"].dtype == np.float32
    assert len(np.unique(grown["a"], axis=0)) == 5  # equal rows would prove nothing about each other


def test_a_given_vector_may_be_empty() -> None:
    made = examples("ids:int64[0]", ids=np.zeros(0, np.int64))
    assert all(made.make(sizes, seed=2)["ids"].shape == (0,) for sizes in made.cases())


def test_given_inputs_must_fit() -> None:
    with pytest.raises(InvalidArgument, match="input 'a' has datatype FP64"):
        examples("a:float32[batch,2]", a=np.zeros((1, 2)))


def test_inputs_beyond_memory_are_refused() -> None:
    with pytest.raises(ExportError, match=r"a:float32\[1000000000000\] do not fit in memory"):
        examples("a:float32[1000000000000]").make({})


def test_specs_are_read_off_the_examples() -> None:
    specs = infer_specs(["a", "b"], {"a": np.zeros((2, 3)), "b": np.zeros(2, np.int8)}, "batch")
    assert [str(spec) for spec in specs] == ["a:float64[batch,3]", "b:int8[batch]"]


def test_examples_without_a_common_first_dimension_need_a_description() -> None:
    for second in (np.zeros(3), np.zeros(())):
        with pytest.raises(ExportError, match=r"different first dimensions .*inputs=\["):
            infer_specs(["a", "b"], {"a": np.zeros((2, 3)), "b": second}, "batch")


def test_further_cases_are_kept_when_more_come() -> None:
    more = examples("x:float32[batch,seq]").at([{"batch": 1, "seq": 1001}]).at([{"batch": 77, "seq": 1}])
    sizes = list(more.cases())
    assert {"batch": 1, "seq": 1001} in sizes
    assert {"batch": 77, "seq": 1} in sizes


class Row:
    """Selects one of ten numbers; negative indices count from the end."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not -10 <= int(inputs["i"]) <= 9:
            raise RejectedInputs("it does not run", "out of range")
        return {"y": inputs["i"]}


@pytest.mark.parametrize(("derived", "kept"), [("-10..9", True), ("0..9", True), ("1..9", False), ("0..8", False)])
def test_only_negative_indices_may_be_refused_that_the_original_accepts(derived: str, kept: bool) -> None:
    """An engine that fuses operators may refuse them."""
    found = proved(Row(), examples("i:int64[]"), {"i": values.parse(derived)})
    assert {name: str(span) for name, span in found.items()} == ({"i": derived} if kept else {})
