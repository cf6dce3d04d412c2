"""What a model itself says about how it is called, for exports that say nothing of their own."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

_MADE = "the folder's tokenizer or processor makes it; "
_DECLARE = "declare all inputs by --input to have it"


@dataclass(frozen=True)
class Defaults:
    """Descriptions of the inputs, an example of them, and constants; what the model does not tell is empty.

    ``others`` are inputs that clients may have, with what is to be said where the graph has none of that name.
    """

    inputs: tuple[str, ...] = ()
    example: Any = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    def left_out(self, names: Collection[str]) -> tuple[str, ...]:
        """Return a note on each input that clients may have, and that is not among those of the graph."""
        return tuple(f"'{name}' is left out: {why}" for name, why in self.others.items() if name not in names)


def of(module: nn.Module) -> Defaults:
    """Return what a transformers model, a LightningModule or a saved program tells of its inputs."""
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        return _of_transformer(module)
    if isinstance(module, fx.GraphModule):
        return Defaults(_of_graph(module))
    example = getattr(module, "example_input_array", None)  # what a LightningModule may state
    return Defaults(example=example)


@contextlib.contextmanager
def exportable(module: nn.Module) -> Iterator[None]:
    """Let a mixture of experts of transformers use batched products, since its grouped ones are no ONNX operator."""
    config = getattr(module, "config", None)
    grouped = getattr(config, "_experts_implementation", None) == "grouped_mm"
    choose: Any = getattr(module, "set_experts_implementation", None)
    if not grouped or choose is None:
        yield
        return
    choose("batched_mm")
    try:
        yield
    finally:
        choose("grouped_mm")


def _of_transformer(module: Any) -> Defaults:
    takes = inspect.signature(module.forward).parameters
    # A cache is an object of transformers, which no client could send; its tensors can be named by the user.
    constants = {"use_cache": False} if "use_cache" in takes else {}
    text = getattr(module.config, "get_text_config", lambda: module.config)()
    longest = getattr(text, "max_position_embeddings", None)
    bound = f"=1..{longest}" if isinstance(longest, int) and longest > 1 else ""
    inputs: list[str] = []
    produced = _produced(Path(str(getattr(module, "name_or_path", ""))))
    if module.main_input_name == "input_ids":
        inputs.append(f"input_ids:int64[batch,seq{bound}]")
        if "attention_mask" in takes:
            inputs.append(f"attention_mask:int64[batch,seq{bound}]")
        if "token_type_ids" in takes and "token_type_ids" in produced:
            inputs.append(f"token_type_ids:int64[batch,seq{bound}]")
        if "decoder_input_ids" in takes:
            inputs.append(f"decoder_input_ids:int64[batch,target{bound}]")
    elif module.main_input_name == "pixel_values":
        vision = getattr(module.config, "vision_config", module.config)
        size = getattr(vision, "image_size", None)
        channels = getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        if isinstance(height, int):
            inputs.append(f"pixel_values:float32[batch,{channels},{height},{width}]")
    others = {name: _MADE + (_DECLARE if name in takes else "the model does not take it") for name in produced}
    if not produced and "token_type_ids" in takes:
        others["token_type_ids"] = "no tokenizer of the folder says that it makes it; for pairs of texts, " + _DECLARE
    return Defaults(tuple(inputs), constants=constants, others=others)


def _produced(folder: Path) -> tuple[str, ...]:
    """Return the names of what the tokenizer and the processor in a folder of transformers make, as far as they say."""
    import transformers

    names: list[str] = []
    for file, keys in (
        ("tokenizer_config.json", ("tokenizer_class",)),
        ("preprocessor_config.json", ("image_processor_type", "feature_extractor_type")),
    ):
        try:
            config = json.loads((folder / file).read_text())
        except (OSError, ValueError):
            continue
        config = config if isinstance(config, dict) else {}
        classes = (getattr(transformers, str(config.get(key)), None) for key in keys)
        stated = (config.get("model_input_names"), *(getattr(item, "model_input_names", None) for item in classes))
        names += next((list(map(str, item)) for item in stated if isinstance(item, list | tuple)), [])
    return tuple(dict.fromkeys(names))


def _of_graph(module: fx.GraphModule) -> tuple[str, ...]:
    """Describe the placeholders of a captured graph; their first dynamic dimension is taken for the batch."""
    names: dict[str, str] = {}
    described = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        shape = [_dimension(size, axis, names) for axis, size in enumerate(value.shape)]
        described.append(f"{node.name}:{str(value.dtype).removeprefix('torch.')}[{','.join(shape)}]")
    return tuple(described)


def _dimension(size: Any, axis: int, names: dict[str, str]) -> str:
    if isinstance(size, int):
        return str(size)
    symbol = str(size)
    if symbol not in names:
        names[symbol] = "batch" if axis == 0 and "batch" not in names.values() else f"dim{len(names)}"
    return names[symbol]
