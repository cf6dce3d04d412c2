"""transformers' image processors as operations: what their PIL backend does to one picture in RGB, field by field.

Fields that the saved configuration lacks come from the processor's class, so the processor itself is read. A class that
overrides methods of the PIL backend has an entry in ``_CLASSES``, or is refused; so is a field that changes the result
and that neither the PIL backend nor the entry reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ingot.errors import Unsupported
from ingot.steps.images.operations import (
    FILTERS,
    CenterCrop,
    Normalize,
    Operation,
    Pad,
    Quantize,
    Rescale,
    Resize,
    Reverse,
)

_Part = Callable[[Any], Iterator[Operation]]

# Methods of the PIL backend whose arithmetic the operations have; an override changes the result.
_METHODS = ("_preprocess", "resize", "center_crop", "rescale", "normalize", "pad", "process_image", "convert_to_rgb")
_FIELDS = {
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_pad", "pad_size",
}  # fmt: skip
# Fields without effect on a single picture in RGB: of training, segmentation maps, text and the form of the result.
_WITHOUT_EFFECT = {
    "return_tensors", "data_format", "input_data_format", "device", "disable_grouping", "image_seq_length",
    "default_to_square", "do_convert_rgb", "do_reduce_labels", "do_convert_annotations", "format",
    "return_segmentation_masks", "ignore_index", "num_labels", "image_num_channels", "image_size", "mask_size",
    "mask_pad_size",
}  # fmt: skip
# Fields of FLAVA's further tensors, as their names begin, by the field that asks for these.
_OPTIONAL = {
    "return_codebook_pixels": ("codebook_",),
    "return_image_mask": ("input_size_patches", "total_mask_", "mask_group_"),
}
_NAMES = {number: name for name, number in FILTERS.items()}


def operations_of(processor: Any) -> list[Operation]:
    """Return the operations of a processor of transformers on one picture in RGB, in its order.

    Args:
        processor: an image processor with the PIL backend.

    Raises:
        Unsupported: its class or one of its fields does more than the operations do.
    """
    name = type(processor).__name__
    if getattr(processor, "backend", None) != "pil":
        raise Unsupported(f"{name} does not use Pillow: load it with backend='pil'")
    parts, fields = _CLASSES.get(name.removesuffix("Pil").removesuffix("ImageProcessor"), (None, ()))
    if parts is None and (methods := _overridden(processor)):
        raise Unsupported(
            f"the steps of {name} are not known, as its class has its own {', '.join(methods)}: declare the steps by "
            "hand, or send tensors"
        )
    unused = tuple(
        option for flag, options in _OPTIONAL.items() if not getattr(processor, flag, None) for option in options
    )
    for field in type(processor).valid_kwargs.__annotations__:
        value = getattr(processor, field, None)
        if (
            field not in _FIELDS | _WITHOUT_EFFECT
            and not field.startswith(unused)
            and field not in fields
            and value not in (None, False, "")
        ):
            raise Unsupported(
                f"the field '{field}' of {name}, here {value!r}, is not known: declare the steps by hand, or send "
                "tensors"
            )
    return [operation for part in parts or (_resize, _crop, _values, _pad) for operation in part(processor)]


def _overridden(processor: Any) -> list[str]:
    from transformers.image_processing_backends import PilBackend

    return [name for name in _METHODS if getattr(type(processor), name) is not getattr(PilBackend, name)]


def _resize(processor: Any, **changes: Any) -> Iterator[Operation]:
    """Resize by the first keys of the size that the PIL backend looks for; ``changes`` are those of a class."""
    if not processor.do_resize:
        return
    size = processor.size
    if size.shortest_edge and size.longest_edge:
        rule = {"rule": "bounded_edges", "edge": size.shortest_edge, "longest": size.longest_edge}
    elif size.shortest_edge:
        rule = {"rule": "shortest_edge", "edge": size.shortest_edge}
    elif size.max_height and size.max_width:
        rule = {"rule": "fit", "height": size.max_height, "width": size.max_width}
    elif size.height and size.width:
        rule = {"rule": "exact", "height": size.height, "width": size.width}
    else:
        raise Unsupported(f"the size {dict(size)} of {type(processor).__name__} is not known")
    yield Resize(**{"filter": _filter(processor), **rule, **changes})


def _filter(processor: Any) -> Any:
    """Return the name of a processor's filter; that of the PIL backend is bilinear."""
    return "bilinear" if processor.resample is None else _NAMES[int(processor.resample)]


def _crop(processor: Any) -> Iterator[Operation]:
    if processor.do_center_crop:
        size = processor.crop_size
        yield CenterCrop(height=size.height or size.shortest_edge, width=size.width or size.shortest_edge)


def _rescale(processor: Any) -> Iterator[Operation]:
    if processor.do_rescale:
        offset = -1 if getattr(processor, "rescale_offset", False) else 0
        yield Rescale(factor=processor.rescale_factor, offset=offset)


def _values(processor: Any) -> Iterator[Operation]:
    yield from _rescale(processor)
    if processor.do_normalize:
        yield _normalize(processor.image_mean, processor.image_std)


def _normalize(mean: Any, std: Any) -> Normalize:
    mean, std = ((each,) * 3 if isinstance(each, int | float) else each for each in (mean, std))
    return Normalize(mean=mean, std=std)


def _pad(processor: Any) -> Iterator[Operation]:
    """Pad to a declared size; without one, a picture alone is not extended."""
    size = getattr(processor, "pad_size", None)
    if processor.do_pad and size is not None:
        yield Pad(to="size", height=size.height, width=size.width)


def _detector_resize(processor: Any) -> Iterator[Operation]:
    """Resize without a rule for the shorter side alone."""
    if processor.size.shortest_edge and not processor.size.longest_edge:
        raise Unsupported(f"the size {dict(processor.size)} of {type(processor).__name__} is not known")
    return _resize(processor)


def _yolos_resize(processor: Any) -> Iterator[Operation]:
    bounded = processor.size.shortest_edge and processor.size.longest_edge
    return _resize(processor, **({"rule": "bounded_edges_exact", "multiple": 16} if bounded else {}))


def _larger_resize(processor: Any) -> Iterator[Operation]:
    """Resize to the next multiples."""
    return _resize(processor, multiple=processor.size_divisor or 1, round_up=True)


def _maskformer_pad(processor: Any) -> Iterator[Operation]:
    if processor.pad_size is not None:
        yield Pad(to="size", height=processor.pad_size.height, width=processor.pad_size.width)


def _convnext_resize(processor: Any) -> Iterator[Operation]:
    """Resize to more than the crop below 384 pixels; stretch from there on."""
    edge = processor.size.shortest_edge
    if edge >= 384:
        return _resize(processor, rule="exact", height=edge, width=edge, edge=0)
    return _resize(processor, edge=int(edge / processor.crop_pct))


def _convnext_crop(processor: Any) -> Iterator[Operation]:
    if processor.do_resize and processor.size.shortest_edge < 384:
        yield CenterCrop(height=processor.size.shortest_edge, width=processor.size.shortest_edge)
    yield from _crop(processor)


def _poolformer_resize(processor: Any) -> Iterator[Operation]:
    size, part = processor.size, processor.crop_pct
    if part is None:
        return _resize(processor)
    if size.shortest_edge or size.height == size.width:
        edge = int((size.shortest_edge or size.height) / part)
        return _resize(processor, rule="shortest_edge", edge=edge, height=0, width=0)
    return _resize(processor, height=int(size.height / part), width=int(size.width / part))


def _levit_resize(processor: Any) -> Iterator[Operation]:
    edge = processor.size.shortest_edge
    return _resize(processor, **({"edge": int((256 / 224) * edge)} if edge else {}))


def _efficientnet_top(processor: Any) -> Iterator[Operation]:
    """Divide by the deviation a second time."""
    if processor.include_top:
        yield _normalize(0, processor.image_std)


def _perceiver_crop(processor: Any) -> Iterator[Operation]:
    if processor.do_center_crop:
        size, crop = processor.size, processor.crop_size
        yield CenterCrop(height=size.height / crop.height, width=size.width / crop.width, relative=True)


def _vilt_resize(processor: Any) -> Iterator[Operation]:
    longest = int(1333 / 800 * processor.size.shortest_edge)
    multiple = processor.size_divisor
    return _resize(processor, rule="bounded_edges_half_up", longest=longest, multiple=multiple)


def _glpn_resize(processor: Any) -> Iterator[Operation]:
    if processor.do_resize:
        yield Resize(rule="keep", multiple=processor.size_divisor, filter=_filter(processor))


def _swin2sr_pad(processor: Any) -> Iterator[Operation]:
    if processor.do_pad:
        yield Pad(to="multiple", multiple=processor.size_divisor, beyond=True, mirrored=True)


def _dpt_resize(processor: Any) -> Iterator[Operation]:
    size, multiple = processor.size, processor.ensure_multiple_of
    if processor.keep_aspect_ratio:
        return _resize(processor, rule="closest", multiple=multiple)
    height, width = (round(side / multiple) * multiple for side in (size.height, size.width))
    return _resize(processor, height=height, width=width)


def _dpt_pad(processor: Any) -> Iterator[Operation]:
    if processor.do_pad and processor.size_divisor is not None:
        yield Pad(to="multiple", multiple=processor.size_divisor, centered=True)


def _eomt_pad(processor: Any) -> Iterator[Operation]:
    """Pad before the normalization, so that the padding is not 0 after it."""
    if processor.do_pad:
        edge, longest = processor.size.shortest_edge, processor.size.longest_edge
        yield Pad(to="size", height=edge, width=longest or edge)


def _donut_resize(processor: Any) -> Iterator[Operation]:
    size = processor.size
    yield from _resize(processor, rule="shortest_edge", edge=min(size.height, size.width), height=0, width=0)
    if processor.do_thumbnail:
        yield Resize(rule="thumbnail", height=size.height, width=size.width, filter=_filter(processor))


def _donut_pad(processor: Any) -> Iterator[Operation]:
    if processor.do_pad:
        yield Pad(to="size", height=processor.size.height, width=processor.size.width, centered=True)


def _square(processor: Any) -> Iterator[Operation]:
    """Extend to a square of the mean colour."""
    if processor.do_pad:
        mean = tuple(int(mean * 255) for mean in processor.image_mean or (0, 0, 0))
        yield Pad(to="square", centered=True, values=getattr(processor, "background_color", mean))


def _sam_resize(processor: Any) -> Iterator[Operation]:
    if processor.do_resize:
        yield Resize(rule="longest_edge_half_up", edge=processor.size.longest_edge, filter=_filter(processor))


def _janus_resize(processor: Any) -> Iterator[Operation]:
    size = processor.size.height
    return _resize(processor, rule="longest_edge", edge=size, least=processor.min_size, height=0, width=0)


def _reverse(processor: Any) -> Iterator[Operation]:
    """Reverse the channels; only MobileViT has a field for that."""
    if getattr(processor, "do_flip_channel_order", True):
        yield Reverse()


def _imagegpt_colours(processor: Any) -> Iterator[Operation]:
    if processor.do_color_quantize:
        if processor.clusters is None:
            raise Unsupported("ImageGPTImageProcessor has no clusters, the colours whose numbers its model reads")
        yield Quantize(colours=processor.clusters.tolist())


_DETR: tuple[_Part, ...] = (_detector_resize, _values, _pad)
_MASKFORMER: tuple[_Part, ...] = (_larger_resize, _values, _maskformer_pad)
_PLAIN: tuple[_Part, ...] = (_resize, _crop, _values)
_DPT: tuple[_Part, ...] = (_dpt_resize, _values, _dpt_pad)
_DPT_FIELDS = ("ensure_multiple_of", "keep_aspect_ratio", "size_divisor")
_JANUS: tuple[_Part, ...] = (_janus_resize, _square, _values)
# The parts of each class that overrides methods of the PIL backend, in its order, and further fields that they read.
_CLASSES: dict[str, tuple[tuple[_Part, ...], tuple[str, ...]]] = {
    "Beit": (_PLAIN, ()),
    "BridgeTower": ((_vilt_resize, _crop, _values), ("size_divisor",)),
    "ConditionalDetr": (_DETR, ()),
    "ConvNext": ((_convnext_resize, _convnext_crop, _values), ("crop_pct",)),
    "DPT": (_DPT, _DPT_FIELDS),
    "DeepseekVL": (_JANUS, ("min_size",)),
    "DeformableDetr": (_DETR, ()),
    "Detr": (_DETR, ()),
    "Donut": ((_donut_resize, _donut_pad, _crop, _values), ("do_thumbnail",)),
    "EfficientNet": ((*_PLAIN, _efficientnet_top), ("rescale_offset", "include_top")),
    "Eomt": ((_resize, _eomt_pad, _values), ()),
    "Flava": (_PLAIN, ()),
    "GLPN": ((_glpn_resize, _values), ("size_divisor",)),
    "GroundingDino": (_DETR, ()),
    "ImageGPT": ((_resize, _values, _imagegpt_colours), ("clusters", "do_color_quantize")),
    "Janus": (_JANUS, ("min_size",)),
    "LayoutLMv2": ((_resize, _reverse), ()),
    "LayoutLMv3": ((_resize, _values), ()),
    "Levit": ((_levit_resize, _crop, _values, _pad), ()),
    "Llava": ((_square, *_PLAIN), ()),
    "Mask2Former": (_MASKFORMER, ("size_divisor",)),
    "MaskFormer": (_MASKFORMER, ("size_divisor",)),
    "MobileNetV2": (_PLAIN, ()),
    "MobileViT": ((_resize, _crop, _rescale, _reverse), ("do_flip_channel_order",)),
    "Perceiver": ((_perceiver_crop, _resize, _values), ()),
    "PoolFormer": ((_poolformer_resize, _crop, _values, _pad), ("crop_pct",)),
    "PromptDepthAnything": (_DPT, (*_DPT_FIELDS, "prompt_scale_to_meter")),
    "RTDetr": (_DETR, ()),
    "Sam": ((_sam_resize, _crop, _values, _pad), ()),
    "Segformer": ((_resize, _values), ()),
    "SuperPoint": ((_resize, _rescale), ()),
    "Swin2SR": ((_swin2sr_pad, _rescale), ("size_divisor",)),
    "TextNet": ((_larger_resize, _crop, _values), ("size_divisor",)),
    "Vilt": ((_vilt_resize, _values), ("size_divisor",)),
    "Yolos": ((_yolos_resize, _values, _pad), ()),
}
