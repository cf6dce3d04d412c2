from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps
from pydantic import ValidationError

from ingot.errors import InvalidArgument, TooLarge, Unsupported
from ingot.steps import image_classification
from ingot.steps.images import presets
from ingot.steps.images.decoding import Limits
from ingot.steps.images.image import Image
from ingot.steps.images.operations import CenterCrop, Normalize, Pad, Quantize, Rescale, Resize
from ingot.steps.images.pictures import drawn
from ingot.steps.images.processors import operations_of
from ingot.steps.tasks.declared import read_steps
from ingot.tensors import Array, DType, Range, Signature, TensorSpec
from scripts import image_processors

STEP = Image(operations=(Resize(rule="exact", height=8, width=8), Rescale(factor=1 / 255)))


def apply(step: Image, *contents: object) -> Array:
    values = step.open(lambda name: b"")({"image": np.array([*contents, None], object)[:-1]})
    return values["pixel_values"]


def file_of(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def picture() -> Any:
    return Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8))


@pytest.mark.parametrize("name", ["convnext.ConvNext", "mobilevit.MobileViT", "imagegpt.ImageGPT"])
def test_values_equal_those_of_transformers_processors(name: str) -> None:
    module, kind = name.split(".")
    found = __import__(f"transformers.models.{module}.image_processing_pil_{module}", fromlist=["x"])
    row = image_processors.row_of(getattr(found, f"{kind}ImageProcessorPil"), count=12)
    assert row.equal >= 11
    assert not row.different


@pytest.mark.long  # four minutes of CPU
def test_the_page_lists_what_every_processor_of_transformers_does() -> None:
    assert image_processors.PAGE.read_text() == image_processors.page(), "run python scripts/image_processors.py"


def test_options_that_are_saved_or_left_out_are_those_of_the_class(tmp_path: Path) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 24}, "resample": 3}')
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    step = Image(operations=tuple(operations_of(processor)))
    assert step.operations == (
        Resize(rule="exact", height=32, width=24, filter="bicubic"),
        Rescale(factor=1 / 255),
        Normalize(mean=(0.5,) * 3, std=(0.5,) * 3),  # the class's
    )
    for content in drawn(9, seed=7):
        assert np.array_equal(apply(step, content)[0], image_processors.reference(processor, content))
    assert Image.model_validate_json(step.model_dump_json()) == step


def test_classes_and_fields_that_are_not_known_are_refused() -> None:
    from transformers.models.donut.image_processing_pil_donut import DonutImageProcessorPil
    from transformers.models.nougat.image_processing_pil_nougat import NougatImageProcessorPil

    with pytest.raises(Unsupported, match=r"NougatImageProcessorPil are not known, as its class has its own _preproc"):
        operations_of(NougatImageProcessorPil())
    with pytest.raises(Unsupported, match="the field 'do_align_long_axis' of DonutImageProcessorPil, here True"):
        operations_of(DonutImageProcessorPil(do_align_long_axis=True))
    with pytest.raises(Unsupported, match="does not use Pillow"):
        operations_of(SimpleNamespace(backend="torchvision"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_are_decoded_as_pillow_decodes_them(picture: Any, kind: str) -> None:
    content = file_of(picture, kind)
    expected = np.asarray(Pillow.open(BytesIO(content)).convert("RGB"))
    assert np.array_equal(apply(Image(), content)[0], expected.transpose(2, 0, 1))


def test_orientation_transparency_and_first_frames(picture: Any) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    turned = file_of(picture, "PNG", exif=exif)
    assert apply(Image(), turned).shape == (1, 3, 30, 40)
    upright = np.asarray(ImageOps.exif_transpose(Pillow.open(BytesIO(turned)))).transpose(2, 0, 1)
    assert np.array_equal(apply(Image(), turned)[0], upright)
    clear = Pillow.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (apply(Image(), file_of(clear)) == 255).all()
    assert (apply(Image(blends=False), file_of(clear)) == 0).all()
    frames = file_of(Pillow.new("RGB", (4, 4), "red"), "GIF", save_all=True, append_images=[Pillow.new("RGB", (4, 4))])
    assert apply(Image(), frames)[0, 0].min() > 250


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_base64_is_the_form_of_files_in_json(picture: Any, kind: str) -> None:
    content = file_of(picture, kind)
    text = base64.b64encode(content)
    expected = apply(Image(), content)
    assert np.array_equal(apply(Image(), text), expected)
    assert np.array_equal(apply(Image(), b"data:image/x;base64," + text), expected)
    with pytest.raises(InvalidArgument, match="is base64 that is not valid"):
        apply(Image(), text + b"?")


def _png(width: int, height: int) -> bytes:
    """Return the start of a PNG of any size, without its pixels."""
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return start + struct.pack(">I", 1000) + b"IDAT"


_JPEG = file_of(Pillow.effect_noise((64, 64), 50), "JPEG")


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", InvalidArgument, "element 0 of input 'image' is empty: send the bytes of a file"),
        (b"%PDF-1.7 ...", InvalidArgument, r"is not a JPEG, .* or TIFF file; its first bytes are b'%PDF-1.7'"),
        (b"\x00\x00\x00\x18ftypheic", InvalidArgument, "is not a JPEG"),
        (_JPEG[:-300], InvalidArgument, "is a damaged or truncated JPEG: OSError: image file is truncated"),
        (_png(100, 100), InvalidArgument, "is a damaged or truncated PNG"),
        (_png(60_000, 60_000), TooLarge, "has too many pixels"),
        (_png(9_000, 9_000), TooLarge, "is 9000 x 9000 pixels; the most are 50000000: send a smaller one"),
        (bytes((20 << 20) + 1), TooLarge, "has 20971521 bytes; the most are 20971520"),
        (file_of(Pillow.new("I;16", (4, 4))), InvalidArgument, "has the mode I;16, of more than 8 bits"),
    ],
    ids=["empty", "PDF", "HEIC", "truncated", "no pixels", "bomb", "pixels", "bytes", "16 bits"],
)
def test_what_is_not_a_picture_is_refused(content: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        apply(STEP, content)


def test_the_element_that_is_refused_is_named(picture: Any) -> None:
    with pytest.raises(InvalidArgument, match="element 1 of input 'image' is not a JPEG"):
        apply(STEP, file_of(picture), b"text")
    with pytest.raises(InvalidArgument, match="element 0 of input 'image' is a str"):
        apply(STEP, "cat.jpg")


def test_a_narrow_picture_is_not_made_huge() -> None:
    narrow = file_of(Pillow.new("RGB", (1, 65_500)))
    step = Image(operations=(Resize(rule="shortest_edge", edge=224), CenterCrop(height=224, width=224)))
    with pytest.raises(InvalidArgument, match="is 1 x 65500 pixels, which the model's steps resize to 224 x 14672000"):
        apply(step, narrow)
    with pytest.raises(InvalidArgument, match="more than the 8 x 8 that the model's steps extend it to"):
        apply(Image(operations=(Pad(to="size", height=8, width=8),)), narrow)


def test_pictures_of_several_sizes_need_several_requests(picture: Any) -> None:
    step = Image(operations=(Resize(rule="shortest_edge", edge=8),))
    with pytest.raises(InvalidArgument, match=r"have the shapes \[3, 10, 8\], \[3, 8, 8\] after step 'image'"):
        apply(step, file_of(picture), file_of(picture.resize((30, 30))))


def test_pictures_of_several_sizes_share_a_batch_beside_a_mask(picture: Any) -> None:
    step = Image(operations=(Resize(rule="shortest_edge", edge=8),), pixel_mask="pixel_mask", size="size")
    exif = Pillow.Exif()
    exif[0x0112] = 6
    contents = file_of(picture, exif=exif), file_of(picture.resize((30, 30)))
    values = step.open(lambda name: b"")({"image": np.array(contents, object)})
    assert values["size"].tolist() == [[30, 40], [30, 30]]  # upright
    assert values["pixel_values"].shape == (2, 3, 8, 10)
    assert values["pixel_mask"].sum((1, 2)).tolist() == [80, 64]
    assert not values["pixel_values"][1, :, :, 8:].any()
    alone = Image(operations=step.operations).open(lambda name: b"")({"image": np.array(contents[1:], object)})
    assert np.array_equal(values["pixel_values"][1, :, :, :8], alone["pixel_values"][0])
    declared = step.model_copy(update={"padded": (9, 12)})
    assert apply(declared, contents[0]).shape == (1, 3, 9, 12)
    with pytest.raises(InvalidArgument, match="has 10 x 8 pixels after it was resized, more than the 8 x 8"):
        apply(step.model_copy(update={"padded": (8, 8)}), contents[0])
    few = step.model_copy(update={"limits": Limits(pixels=1500)})
    with pytest.raises(TooLarge, match="have 20 x 10 x 8 pixels once they have one size; the most are 1500: divide"):
        apply(few, *contents * 10)


def test_timms_configurations() -> None:
    resize, crop, rescale, normalize = presets.from_timm(
        {
            "input_size": (3, 224, 224),
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "mean": (0.1,) * 3,
            "std": (0.2,) * 3,
        }
    )
    assert resize == Resize(rule="shortest_edge", edge=248, filter="bicubic")
    assert crop == CenterCrop(height=224, width=224, rounding="even")
    assert (rescale, normalize) == (Rescale(factor=1 / 255), Normalize(mean=(0.1,) * 3, std=(0.2,) * 3))
    squashed = presets.from_timm({"crop_mode": "squash", "crop_pct": 1.0})[0]
    assert squashed == Resize(rule="exact", height=224, width=224, filter="bicubic")
    with pytest.raises(Unsupported, match="crop_mode 'border'"):
        presets.from_timm({"crop_mode": "border"})
    with pytest.raises(Unsupported, match="pictures of 1 channels"):
        presets.from_timm({"input_size": (1, 28, 28)})


def _named(name: str, **values: Any) -> Any:
    return type(name, (), values)()


def test_torchvisions_transforms() -> None:
    mode = SimpleNamespace(value="bilinear")
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    weights = SimpleNamespace(crop_size=[224], resize_size=[256], mean=mean, std=std, interpolation=mode)
    by_hand = presets.classifier(224, mean, std, resize=256)
    assert presets.from_torchvision(weights) == by_hand
    parts = [
        _named("Resize", size=256, interpolation=mode, max_size=None),
        _named("CenterCrop", size=(224, 224)),
        _named("ToTensor"),
        _named("Normalize", mean=mean, std=std),
    ]
    assert presets.from_torchvision(SimpleNamespace(transforms=parts)) == by_hand
    with pytest.raises(Unsupported, match=r"torchvision's .*Grayscale.* is not known"):
        presets.from_torchvision(SimpleNamespace(transforms=[_named("Grayscale")]))


def test_steps_are_declared_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.toml"
    file.write_text('task = "image-classification"\nlabels = ["cat", "dog"]\nsize = 8\nresize = 9\ntop_k = 1')
    steps = read_steps(file).steps
    assert steps.before == (Image(operations=presets.classifier(8, resize=9)),)
    assert steps.outputs[0].shape == ("batch", 1)
    file.write_text('task = "image-classification"\nlabels = ["cat"]\nsise = 8')
    with pytest.raises(InvalidArgument, match="'sise' is not an option of the task image-classification: kind, image"):
        read_steps(file)
    file.write_text('task = "image-classification"\nlabels = ["cat"]\nsize = 8\nresize = 4')
    with pytest.raises(InvalidArgument, match="resize=4 is smaller than the size 8 x 8 that is cut out"):
        read_steps(file)


def test_dividing_by_255_is_multiplying_by_its_inverse_in_float64() -> None:
    levels = np.arange(256, dtype=np.uint8)
    divided = levels.astype(np.float32) / np.float32(255)
    assert np.array_equal(Rescale(factor=1 / 255).apply(levels, 0), divided)


def test_numbers_of_colours_end_the_operations() -> None:
    colours = Quantize(colours=((0, 0, 0), (255, 0, 0), (255, 0, 0)))
    with pytest.raises(ValidationError, match="'quantize' must be the last operation"):
        Image(operations=(colours, Rescale(factor=1 / 255)))
    red = Pillow.new("RGB", (2, 1), (200, 9, 9))
    red.putpixel((1, 0), (3, 3, 3))
    assert apply(Image(operations=(Rescale(factor=1), colours)), file_of(red)).tolist() == [[1, 0]]


def test_torchvisions_crop_rounds_half_to_even() -> None:
    pixels = np.arange(7 * 4 * 3, dtype=np.uint8).reshape(7, 4, 3)
    even = CenterCrop(height=4, width=6, rounding="even").apply(pixels, 1000)
    assert even.shape == (4, 6, 3)
    assert np.array_equal(even[:, 1:5], pixels[2:6])  # round(1.5), where transformers takes 1
    assert np.array_equal(CenterCrop(height=4, width=4).apply(pixels, 1000), pixels[1:5])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            (96, 10),
            "has 96 x 10 pixels after the model's steps, .* takes a width of 32 to 96 and a height of 32 to 64 in",
        ),
        ((31, 40), "has 31 x 40 pixels .* multiples of 16: send one of another size or aspect ratio"),
    ],
)
def test_a_picture_that_the_graph_does_not_take_is_named(size: tuple[int, int], message: str) -> None:
    pixels = TensorSpec("pixel_values", DType.FP32, ("batch", 3, "height", "width"))
    ranges = {"height": Range(32, 64, 16), "width": Range(32, 96)}
    signature = Signature((pixels,), (TensorSpec("logits", DType.FP32, ("batch", 1)),), "batch", ranges)
    opened = image_classification(["a"], operations=[Rescale(factor=1 / 255)]).steps.open(lambda name: b"", signature)
    raw = {"image": np.array([file_of(Pillow.new("RGB", size)), None], object)[:1]}
    with pytest.raises(InvalidArgument, match=f"a picture of input 'image' {message}"):
        opened.tensors(opened.prepare(raw))
    raw["image"][0] = file_of(Pillow.new("RGB", (33, 32)))
    assert opened.tensors(opened.prepare(raw))["pixel_values"].shape == (1, 3, 32, 33)
