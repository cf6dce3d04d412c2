from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ingot.errors import InvalidArgument, NotFound, Unsupported
from ingot.model_store import Golden
from ingot.model_store.format.goldens import encode
from ingot.quant.data import variance
from ingot.quant.data.samples import Samples
from ingot.quant.data.synthetic import synthetic
from ingot.tensors import Array, DType, Range, Signature, parse_spec


def signature(*inputs: str, batch: str | None = "batch", output: str = "y:float32[batch,4]") -> Signature:
    ranges: dict[str, Range] = {}
    specs = []
    for text in inputs:
        spec, bounds = parse_spec(text)
        specs.append(spec)
        ranges |= bounds
    return Signature(tuple(specs), (parse_spec(output)[0],), batch, ranges)


X = signature("x:float32[batch,8]")
TEXT = signature("ids:int64[batch,seq]", "mask:int64[batch,seq]")
ALONE = signature("x:float32[seq,2]", batch=None, output="y:float32[seq]")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def rows() -> Array:
    return RNG.standard_normal((50, 8)).astype(np.float32)


def joined(samples: Samples, name: str = "x") -> Array:
    return np.concatenate([batch.inputs[name] for batch in samples.batches()])


class TestContainers:
    """The same rows from any container are the same samples."""

    def same(self, data: Any, rows: Array, labels: bool = True) -> None:
        samples = Samples.read(X, data)
        assert samples.rows == 50
        assert np.array_equal(joined(samples), rows)
        expected: dict[str, Array] = {"x": rows, "labels": np.arange(50)} if labels else {"x": rows}
        assert samples.extras == (("labels",) if labels else ())
        assert samples.digest == Samples.read(X, expected).digest
        if labels:
            assert samples.column("labels").tolist() == list(range(50))

    def test_arrays(self, rows: Array) -> None:
        self.same(rows, rows, labels=False)
        self.same(torch.from_numpy(rows), rows, labels=False)
        self.same({"x": torch.from_numpy(rows), "labels": list(range(50))}, rows)
        self.same((rows, np.arange(50)), rows)
        self.same({"x": rows.astype(">f4"), "labels": np.arange(50)}, rows)

    def test_files(self, rows: Array, tmp_path: Path) -> None:
        np.savez(
            tmp_path / "a.npz", x=rows, labels=np.arange(50), version=np.array(3)
        )  # one value does not determine rows
        self.same(tmp_path / "a.npz", rows)
        np.save(tmp_path / "x.npy", rows)
        self.same(str(tmp_path / "x.npy"), rows, labels=False)
        np.save(tmp_path / "labels.npy", np.arange(50))
        (tmp_path / "a.npz").unlink()
        self.same(tmp_path, rows)

    def test_iterables(self, rows: Array) -> None:
        dataset = TensorDataset(torch.from_numpy(rows), torch.arange(50))
        self.same(DataLoader(dataset, batch_size=7), rows)
        self.same(dataset, rows)  # single rows, without the batch dimension
        self.same(({"x": row, "labels": number} for number, row in enumerate(rows)), rows)
        self.same([((row,), np.int64(number)) for number, row in enumerate(rows)], rows)
        self.same(list(rows), rows, labels=False)

    def test_recorded_traffic(self, rows: Array, tmp_path: Path) -> None:
        requests = [Golden({"x": part}, {"y": part[:, :4]}) for part in np.split(rows, [1, 4, 30])]
        folder = tmp_path / "model" / "1"
        folder.mkdir(parents=True)
        (folder / "000000.safetensors").write_bytes(encode(requests[:2]))
        (folder / "000001.safetensors").write_bytes(encode(requests[2:]))
        self.same(tmp_path, rows, labels=False)

    def test_recorded_rows_that_are_not_finite_are_left_out(self, tmp_path: Path) -> None:
        takes = signature("x:float32[seq,batch]", "table:float32[2]")
        x, table = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
        odd = x.copy()
        odd[0, 1], odd[1, 2] = np.nan, -np.inf
        requests = [{"x": odd, "table": table}, {"x": x, "table": table * np.inf}, {"x": x, "table": table}]
        path = tmp_path / "0.safetensors"
        path.write_bytes(encode([Golden(inputs, {}) for inputs in requests]))
        for data in (tmp_path, path):
            samples = Samples.read(takes, data)
            (batch,) = samples.batches()
            assert np.array_equal(batch.inputs["x"], np.concatenate([x[:, :1], x], axis=1))
            assert samples.notes == ("5 rows that hold NaN or infinity were left out",)
        path.write_bytes(encode([Golden(inputs, {}) for inputs in requests[1:2]]))
        with pytest.raises(InvalidArgument, match="it has no rows; 3 rows that hold NaN or infinity were left out"):
            Samples.read(takes, tmp_path)
        alone = [{"x": np.full((size, 2), value, np.float32)} for size, value in ((2, 1), (3, np.nan))]
        path.write_bytes(encode([Golden(inputs, {}) for inputs in alone]))
        assert Samples.read(ALONE, tmp_path).rows == 1

    def test_recorded_answers_are_not_kept_in_memory(self, rows: Array, tmp_path: Path) -> None:
        (tmp_path / "0.safetensors").write_bytes(encode([Golden({"x": rows}, {"y": np.ones((50, 100))})]))
        (batch,) = Samples.read(X, tmp_path).batches(50)
        assert batch.inputs["x"].base is None

    def test_bfloat16_of_torch(self) -> None:
        value = torch.tensor([[1.5, 2.25]], dtype=torch.bfloat16)
        samples = Samples.read(signature("x:bfloat16[batch,2]"), value)
        assert joined(samples).dtype == DType.BF16.numpy
        assert joined(samples).astype(np.float32).tolist() == [[1.5, 2.25]]

    def test_text(self) -> None:
        samples = Samples.read(signature("x:string[batch]"), ["grüße", "b"])
        assert joined(samples).tolist() == ["grüße".encode(), b"b"]
        assert samples.digest == Samples.read(signature("x:string[batch]"), np.array(["grüße", "b"])).digest

    def test_other_values_have_another_digest(self, rows: Array) -> None:
        digests = {Samples.read(X, data).digest for data in (rows, -rows, rows[:40], {"x": rows, "y": np.arange(50)})}
        assert len(digests) == 4
        assert all(len(digest.removeprefix("sha256:")) == 64 for digest in digests)


class TestSizes:
    def test_texts_of_several_lengths_are_fed_apart(self) -> None:
        items = [
            ({"ids": np.full(size, size), "mask": np.ones(size, np.int64), "labels": size}) for size in (3, 5, 3, 4)
        ]
        samples = Samples.read(TEXT, items)
        assert [batch.inputs["ids"].tolist() for batch in samples.batches()] == [[[3] * 3] * 2, [[5] * 5], [[4] * 4]]
        assert samples.column("labels").tolist() == [3, 3, 5, 4]
        assert [batch.extras["labels"].tolist() for batch in samples.batches(1)] == [[3], [3], [5], [4]]

    def test_tuples_are_in_the_order_of_the_inputs(self) -> None:
        ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.int64)
        samples = Samples.read(TEXT, [(ids, mask), (ids, mask)])
        assert samples.rows == 4
        assert np.array_equal(next(samples.batches()).inputs["ids"], np.concatenate([ids, ids]))

    @pytest.mark.parametrize(
        ("bounds", "given", "sizes"),
        [("", 50, [32, 18]), ("=1..20", 50, [20, 20, 10]), ("=4..16:4", 30, [16, 12]), ("=6..8", 13, [6, 6]),
         ("=8..", 40, [32, 8])],
    )  # fmt: skip
    def test_batches_fit_the_model(self, bounds: str, given: int, sizes: list[int]) -> None:
        samples = Samples.read(signature(f"x:float32[batch{bounds},2]"), np.ones((given, 2), np.float32))
        assert [batch.rows for batch in samples.batches()] == sizes
        assert samples.rows == sum(sizes)
        lost = given - sum(sizes)
        assert samples.notes == (
            (f"{lost} rows were left out: the model does not accept a batch of so few",) if lost else ()
        )

    def test_too_few_rows_for_the_model(self) -> None:
        with pytest.raises(InvalidArgument, match="fewer rows than the 8 that the model needs in one batch"):
            Samples.read(signature("x:float32[batch=8..,2]"), np.ones((7, 2), np.float32))

    def test_a_batch_that_is_not_the_first_axis_and_an_input_that_all_rows_share(self) -> None:
        takes = signature("x:float32[seq,batch]", "table:float32[3]")
        table = np.arange(3, dtype=np.float32)
        x = RNG.standard_normal((5, 4)).astype(np.float32)
        items = [{"x": x, "table": table, "labels": np.arange(4)}, {"x": x, "table": table + 1, "labels": np.arange(4)}]
        samples = Samples.read(takes, items)
        first, second, third, fourth = samples.batches(3)
        assert [batch.rows for batch in (first, second, third, fourth)] == [3, 1, 3, 1]
        assert np.array_equal(first.inputs["x"], x[:, :3])
        assert np.array_equal(first.inputs["table"], table)
        assert np.array_equal(third.inputs["table"], table + 1)

    def test_without_a_batch_each_case_is_a_row(self) -> None:
        cases = [(np.full((size, 2), size, np.float32), size) for size in (3, 4, 3)]
        samples = Samples.read(ALONE, cases)
        assert [batch.inputs["x"].shape for batch in samples.batches()] == [(3, 2), (4, 2), (3, 2)]
        assert samples.column("labels").tolist() == [3, 4, 3]
        assert Samples.read(ALONE, np.ones((3, 2), np.float32)).rows == 1
        stacked = Samples.read(ALONE, {"x": np.ones((5, 3, 2), np.float32), "labels": np.arange(5)})
        assert stacked.rows == 5
        assert stacked.column("labels").tolist() == list(range(5))

    def test_long_iterables_are_bounded(self, rows: Array) -> None:
        def endless() -> Iterator[Array]:
            while True:
                yield rows

        samples = Samples.read(X, endless(), limit=120)
        assert samples.rows == 120
        assert samples.notes == ("only the first 120 rows of the data were read",)
        assert Samples.read(X, [rows, rows], limit=100).notes == ()
        assert Samples.read(X, rows, limit=10).rows == 50  # an array is here anyway


class TestParts:
    def test_a_split_shares_no_row_and_loses_none(self, rows: Array) -> None:
        samples = Samples.read(X, {"x": rows, "labels": np.arange(50)})
        left, right = samples.split(0.3, seed=1)
        assert (left.rows, right.rows) == (15, 35)
        labels = [*left.column("labels"), *right.column("labels")]
        assert sorted(labels) == list(range(50))
        assert np.array_equal(joined(left), rows[left.column("labels")])
        assert samples.split(0.3, seed=1)[0].digest == left.digest != samples.split(0.3, seed=2)[0].digest

    def test_a_split_of_cases_and_of_several_sizes(self) -> None:
        cases = [(np.full((size, 2), size, np.float32), size) for size in range(1, 9)]
        left, right = Samples.read(ALONE, cases).split(0.5, seed=0)
        assert sorted([*left.column("labels"), *right.column("labels")]) == list(range(1, 9))
        assert left.rows == 4

    def test_each_part_of_a_split_has_a_row(self, rows: Array) -> None:
        left, right = Samples.read(X, rows[:2]).split(0.01, seed=0)
        assert (left.rows, right.rows) == (1, 1)
        with pytest.raises(InvalidArgument, match="has only one row"):
            Samples.read(X, rows[:1]).split(0.5, seed=0)
        with pytest.raises(InvalidArgument, match="between 0 and 1"):
            Samples.read(X, rows).split(1.5, seed=0)

    def test_some_rows(self, rows: Array) -> None:
        samples = Samples.read(X, {"x": rows, "labels": np.arange(50)})
        some = samples.take(10, seed=0)
        assert some.rows == 10
        assert list(some.column("labels")) == sorted(set(some.column("labels")))
        assert samples.take(100, seed=0) is samples


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"x": np.ones((5, 8), np.float32), "y": np.ones(4)}, r"has 5 rows of inputs, but 4 in 'y'"),
            (5, "is of type int; pass arrays by name, a path, or an iterable"),
            ([], "is empty: it has no rows"),
            ([np.ones((0, 8), np.float32)], r"item 0 of the calibration data is empty: 'x' has shape \[0, 8\]"),
            ([np.ones((2, 8), np.float32), np.ones((2, 7), np.float32)], "item 1 .* dimension 1 of input 'x' is 7"),
            (
                [(np.ones((2, 8), np.float32),) * 3],
                r"item 0 .* has 3 arrays; the model's inputs are x, and one more",
            ),
            ({"x": [[1.0], [1.0, 2.0]]}, "'x' in the calibration data cannot be converted to an array"),
            (
                [{"x": np.ones((2, 8), np.float32), "y": [1, 2]}, np.ones((2, 8), np.float32)],
                "only some of them have 'y'",
            ),
            ({"x": np.array([[None] * 8])}, "input 'x' has datatype BYTES, the model takes FP32"),
        ],
    )
    def test_data(self, data: Any, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            Samples.read(X, data)

    def test_half_types_are_searched_for_nan(self) -> None:
        for dtype in (DType.FP16, DType.BF16):
            with pytest.raises(InvalidArgument, match="contains NaN or infinity in 'x'"):
                Samples.read(signature(f"x:{dtype.torch_name}[batch,1]"), np.array([[np.nan]]).astype(dtype.numpy))

    def test_the_purpose_is_named(self) -> None:
        with pytest.raises(InvalidArgument, match="the evaluation data lacks the input 'x'"):
            Samples.read(X, {}, purpose="evaluation data")

    def test_files(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"nope\.npy"):
            Samples.read(X, tmp_path / "nope.npy")
        for empty in ("", " "):
            with pytest.raises(InvalidArgument, match="the path of the calibration data is empty; give one"):
                Samples.read(X, empty)
        (tmp_path / "data.txt").write_text("1,2")
        with pytest.raises(InvalidArgument, match=r"data\.txt is not data of a known kind: \.npz"):
            Samples.read(X, tmp_path / "data.txt")
        with pytest.raises(InvalidArgument, match=r"contains neither \.npy files, one per input, nor images"):
            Samples.read(X, tmp_path)
        np.save(tmp_path / "x.npy", np.array([{}], dtype=object))
        with pytest.raises(InvalidArgument, match=r"x\.npy is not an \.npy file of a plain array"):
            Samples.read(X, tmp_path / "x.npy")
        np.savez(tmp_path / "x.npz", x=np.array([{}], dtype=object))
        with pytest.raises(InvalidArgument, match=r"x\.npz is not an \.npz file of plain arrays"):
            Samples.read(X, tmp_path / "x.npz")
        np.save(tmp_path / "x.npy", np.ones((2, 3)))
        with pytest.raises(
            InvalidArgument, match=r"contains one array, but the model has several inputs \(ids, mask\)"
        ):
            Samples.read(TEXT, tmp_path / "x.npy")
        with pytest.raises(InvalidArgument, match="a transform is for a folder of images"):
            Samples.read(X, tmp_path, transform="crop=8")

    def test_files_that_are_not_recorded_traffic(self, tmp_path: Path) -> None:
        (tmp_path / "0.safetensors").write_bytes(b"nothing")
        with pytest.raises(InvalidArgument, match=r"0\.safetensors is not recorded traffic"):
            Samples.read(X, tmp_path)
        (tmp_path / "0.safetensors").write_bytes(encode([Golden({"z": np.ones(2)}, {})]))
        with pytest.raises(
            InvalidArgument, match=r"request 0 of \S*0\.safetensors, lacks the input 'x'; it contains: z"
        ):
            Samples.read(X, tmp_path)

    def test_files_that_may_never_end(self, tmp_path: Path) -> None:
        traffic = tmp_path / "traffic"
        traffic.mkdir()
        (tmp_path / "outside").write_bytes(encode([Golden({"x": np.ones((2, 8), np.float32)}, {})]))
        for path in (
            tmp_path / "pipe.npz",
            tmp_path / "x.npy",
            tmp_path / "pipe.safetensors",
            traffic / "0.safetensors",
        ):
            os.mkfifo(path)
            with pytest.raises(InvalidArgument, match=rf"{path.name}.* it is not a regular file"):
                Samples.read(X, traffic if path.parent == traffic else path)
        (traffic / "0.safetensors").unlink()
        (traffic / "0.safetensors").symlink_to(tmp_path / "outside")
        with pytest.raises(InvalidArgument, match=r"0\.safetensors is not recorded traffic: it is a symbolic link"):
            Samples.read(X, traffic)
        assert Samples.read(X, traffic / "0.safetensors").rows == 2  # the user's own word
        (traffic / "0.safetensors").unlink()
        with (traffic / "0.safetensors").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(InvalidArgument, match=r"0\.safetensors is not recorded traffic: it is larger than 256 MiB"):
            Samples.read(X, traffic)

    def test_items_that_cannot_become_an_array(self) -> None:
        ring: list[Any] = []
        ring.append(ring)
        tensors: list[Any] = [np.ones(1)]
        tensors.append(tensors)
        meta, conjugate = torch.ones(2, 8, device="meta"), torch.ones(2, 8, dtype=torch.complex64).conj()
        items: list[Any] = [ring, tensors, meta, conjugate, {"x": meta}, {"x": ring}, {"x": {}}]
        for item in items:
            with pytest.raises(InvalidArgument, match="item 0 of the calibration data"):
                Samples.read(X, [item])

    def test_an_extra_that_is_not_there(self) -> None:
        samples = Samples.read(X, {"x": np.ones((5, 8), np.float32), "y": np.arange(5)})
        with pytest.raises(InvalidArgument, match="has no array 'labels'; it contains: y"):
            samples.column("labels")


class TestImages:
    SPEC = "x:float32[batch,3,4,6]"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        image = pytest.importorskip("PIL.Image")
        for number, (name, color) in enumerate((("dog", (255, 0, 0)), ("cat", (0, 51, 0)), ("dog", (0, 0, 102)))):
            (tmp_path / name).mkdir(exist_ok=True)
            image.new("RGB", (60 + number, 40), color).save(tmp_path / name / f"{number}.png")
        (tmp_path / "ant").mkdir()
        return tmp_path

    def test_sub_folders_are_classes(self, folder: Path) -> None:
        samples = Samples.read(signature(self.SPEC), folder)
        assert samples.classes == ("ant", "cat", "dog")
        assert samples.column("labels").tolist() == [1, 2, 2]
        x = joined(samples)
        assert x.shape == (3, 3, 4, 6)
        assert np.allclose(x[:, :, 0, 0], np.array([[0, 0.2, 0], [1, 0, 0], [0, 0, 0.4]]))

    def test_the_declared_transform_is_applied(self, folder: Path) -> None:
        samples = Samples.read(
            signature(self.SPEC), folder, transform="resize=8, crop=4x6, mean=0.5/0.2/0, std=0.5/0.1/2, color=bgr"
        )
        x = joined(samples)  # [B, C, H, W] with blue first
        assert np.allclose(x[:, :, 0, 0], np.array([[-1, 0, 0], [-1, -2, 0.5], [-0.2, -2, 0]]), atol=1e-6)

    @pytest.mark.parametrize(
        ("spec", "shape"),
        [
            ("x:float32[batch,4,6,3]", (3, 4, 6, 3)),
            ("x:float32[batch,1,4,6]", (3, 1, 4, 6)),
            ("x:float16[batch,3,4,6]", (3, 3, 4, 6)),
        ],
    )
    def test_the_models_input_determines_the_layout(self, folder: Path, spec: str, shape: tuple[int, ...]) -> None:
        assert joined(Samples.read(signature(spec), folder)).shape == shape

    def test_bytes_are_fed_as_they_are(self, folder: Path) -> None:
        x = joined(Samples.read(signature("x:uint8[batch,4,6,3]"), folder))
        assert x.dtype == np.uint8
        assert x[:, 0, 0].tolist() == [[0, 51, 0], [255, 0, 0], [0, 0, 102]]

    def test_a_model_without_a_batch(self, folder: Path) -> None:
        fixed = signature("x:float32[1,3,4,6]", batch=None, output="y:float32[1,4]")
        assert [batch.inputs["x"].shape for batch in Samples.read(fixed, folder).batches()] == [(1, 3, 4, 6)] * 3

    def test_the_middle_is_kept_as_pixels(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        pixels = np.arange(8 * 10, dtype=np.uint8).reshape(8, 10)
        image.fromarray(pixels).save(tmp_path / "a.png")
        samples = Samples.read(signature("x:float32[batch,1,h,w]"), tmp_path, transform="resize=8x10,crop=4x6,scale=1")
        assert samples.extras == ()
        assert np.array_equal(joined(samples)[0, 0], pixels[2:6, 2:8])
        whole = Samples.read(signature("x:float32[batch,1,h,w]"), tmp_path, transform="scale=1")
        assert np.array_equal(joined(whole)[0, 0], pixels)

    def test_of_many_images_some_of_each_class_are_read(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        for number in range(12):
            path = tmp_path / f"class{number // 4}" / f"{number:02}.png"
            path.parent.mkdir(exist_ok=True)
            image.new("L", (4, 4), number).save(path)
        samples = Samples.read(signature("x:uint8[batch,1,4,4]"), tmp_path, limit=6)
        assert joined(samples)[:, 0, 0, 0].tolist() == [0, 2, 4, 6, 8, 10]
        assert samples.notes == ("6 of the 12 images were read, evenly spaced",)

    def test_a_damaged_image_is_named(self, folder: Path) -> None:
        (folder / "dog" / "bad.jpg").write_bytes(b"no image")
        with pytest.raises(InvalidArgument, match=r"bad\.jpg cannot be read"):
            Samples.read(signature(self.SPEC), folder)
        whole = (folder / "dog" / "0.png").read_bytes()
        (folder / "dog" / "bad.jpg").unlink()
        (folder / "dog" / "half.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InvalidArgument, match=r"half\.png cannot be read"):
            Samples.read(signature(self.SPEC), folder)

    def test_without_pillow(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(Unsupported, match=r"needs the package 'pillow', .* pip install 'ingot-serve\[images\]'"):
            Samples.read(signature(self.SPEC), folder)

    @pytest.mark.parametrize("transform", [None, "resize=100"])
    def test_a_line_is_not_scaled_to_cover_a_square(self, tmp_path: Path, transform: str | None) -> None:
        pytest.importorskip("PIL.Image").new("L", (1, 65000)).save(tmp_path / "line.png")
        with pytest.raises(InvalidArgument, match=r"line\.png of 1 x 65000 pixels would be scaled to .* too large"):
            Samples.read(signature("x:uint8[batch,1,100,100]"), tmp_path, transform=transform)

    def test_an_image_beyond_the_memory_is_named(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        image = pytest.importorskip("PIL.Image")

        def full(*_: Any, **__: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(image.Image, "resize", full)
        with pytest.raises(InvalidArgument, match=r"not enough memory for the image .*1\.png"):
            Samples.read(signature(self.SPEC), folder)

    def test_more_than_8_bits_are_refused(self, tmp_path: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        image.fromarray(np.full((4, 4), 1000, np.uint16)).save(tmp_path / "deep.png")
        with pytest.raises(InvalidArgument, match=r"deep\.png has more than 8 bits per value"):
            Samples.read(signature("x:float32[batch,1,4,4]"), tmp_path)

    @pytest.mark.parametrize(
        ("transform", "message"),
        [
            ("size=224", "'size=224' is not part of a transform; known: resize, crop"),
            ("crop=big", "crop=big of the transform is not a size; write crop=224 or crop=224x320"),
            ("crop=5x6", "crop=5x6 of the transform does not fit the input"),
            ("mean=1/2", "mean=1/2 of the transform must be 1 or 3 numbers"),
            ("std=0", "std=0 of the transform must be"),
            ("scale=1/0", "scale=1/0 of the transform is not a number"),
            ("layout=hwc", "layout=hwc of the transform is not known; known: nchw, nhwc"),
            ("color=gray", "does not accept images of color=gray and layout=nchw"),
            ("crop=4x6,crop=4x6", "contains crop twice"),
            ("resize=65536x65536", "resize=65536x65536 of the transform is too large"),
            ("resize=65536", "resize=65536 of the transform is too large"),
        ],
    )
    def test_transforms_that_cannot_be(self, folder: Path, transform: str, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            Samples.read(signature(self.SPEC), folder, transform=transform)

    @pytest.mark.parametrize(
        ("takes", "message"),
        [
            (X, r"the input x:float32\[batch,8\] does not accept images"),
            (TEXT, r"the model has several inputs \(ids, mask\)"),
            (signature("x:int64[batch,3,4,6]"), "it must be float or uint8"),
            (signature("x:float32[batch,3,65536,65536]"), "is too large for images"),
        ],
    )
    def test_models_that_take_no_images(self, folder: Path, takes: Signature, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            Samples.read(takes, folder)


class TestGenerated:
    def test_without_examples(self) -> None:
        takes = signature("x:float32[batch,8]", "ids:int64[batch,seq=1..4]", "flag:bool[batch]", "text:string[batch]")
        samples = synthetic(takes, 40, seed=3)
        assert samples.rows == 40
        (batch,) = samples.batches(100)
        assert batch.inputs["ids"].shape == (40, 4)
        assert set(np.unique(batch.inputs["ids"])) <= {0, 1}
        assert abs(batch.inputs["x"].mean()) < 0.3
        assert synthetic(takes, 40, seed=3).digest == samples.digest != synthetic(takes, 40, seed=4).digest

    def test_like_the_examples(self) -> None:
        examples = [
            {"ids": np.full((2, 3), 70), "mask": np.array([[1, 1, 0], [1, 0, 0]])},
            {"ids": np.full((1, 5), 90), "mask": np.ones((1, 5), np.int64)},
        ]
        samples = synthetic(TEXT, 30, examples=examples)
        assert samples.rows == 30
        shapes = {batch.inputs["ids"].shape[1] for batch in samples.batches()}
        assert shapes == {3, 5}
        for batch in samples.batches():
            assert set(np.unique(batch.inputs["ids"])) <= {70, 90}
            assert batch.inputs["mask"][:, 0].all()

    def test_floats_stay_within_the_examples_range(self) -> None:
        example = RNG.uniform(5, 6, (4, 8)).astype(np.float32)
        x = joined(synthetic(X, 20, examples=[{"x": example}]))
        assert x.dtype == np.float32
        assert x.min() >= example.min()
        assert x.max() <= example.max()
        assert len(np.unique(x)) > 50

    def test_cases_without_a_batch(self) -> None:
        assert synthetic(ALONE, 5, examples=[{"x": np.ones((3, 2), np.float32)}]).rows == 5


class TestVariance:
    """Accuracy that is measured on equal rows is perfect, and says nothing."""

    @pytest.mark.parametrize(
        ("takes", "data"),
        [
            (X, np.zeros((400, 8), np.float32)),
            (X, np.tile(RNG.standard_normal((1, 8)), (20, 1)).astype(np.float32)),
            (TEXT, {"ids": np.full((9, 4), 7), "mask": np.ones((9, 4), np.int64)}),
            (ALONE, {"x": np.ones((5, 3, 2), np.float32)}),
            (signature("t:bytes[batch]"), np.array([b"a"] * 4, object)),
        ],
    )
    def test_equal_rows_are_refused(self, takes: Signature, data: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"all \d+ rows of the calibration data are equal: .* pass real ones"):
            variance.check(Samples.read(takes, data))

    def test_one_row_cannot_vary(self) -> None:
        assert variance.check(Samples.read(X, np.zeros((1, 8), np.float32))) == ()

    def test_an_input_that_does_not_vary_is_noted(self) -> None:
        """Texts without padding have such a mask. Of several lengths, it varies."""
        mask = np.ones((9, 4), np.int64)
        same = Samples.read(TEXT, {"ids": np.arange(36).reshape(9, 4), "mask": mask})
        assert variance.check(same) == (
            "input 'mask' is the same in all 9 rows of the calibration data: the result holds for this value only",
        )
        several = [{"ids": np.arange(size), "mask": np.ones(size, np.int64)} for size in (3, 5)]
        assert variance.check(Samples.read(TEXT, several)) == ()

    @pytest.mark.parametrize("axis", [1, -1])
    def test_channels_that_do_not_vary_are_noted(self, rows: Array, axis: int) -> None:
        array, takes = rows.copy(), X
        if axis == 1:
            array, takes = array.reshape(50, 2, 2, 2), signature("x:float32[batch,2,2,2]")
        array[:, 1] = 3
        (note,) = variance.check(Samples.read(takes, array))
        assert note.startswith(f"1 of the {array.shape[axis]} channels of input 'x' hold one value only")
