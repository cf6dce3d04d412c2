"""Descriptions of inputs that a model itself provides, for exports without any."""

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

from ingot.export.source import sounds

_PRODUCED = "the folder's tokenizer or processor produces it; "
_DECLARE = "declare all inputs with --input to include it"


@dataclass(frozen=True)
class Defaults:
    """Descriptions of the inputs, an example of them, and constants; empty where the model has none.

    ``others`` are further inputs that clients may send, each with the reason why the graph does not have it.
    """

    inputs: tuple[str, ...] = ()
    example: Any = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    def left_out(self, names: Collection[str]) -> tuple[str, ...]:
        """Return a note on each input that clients may send and that is not among the graph's ``names``."""
        return tuple(f"'{name}' is left out: {why}" for name, why in self.others.items() if name not in names)


def of(module: nn.Module) -> Defaults:
    """Return the defaults of a transformers model, a LightningModule or a saved program."""
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        return _of_transformer(module)
    if isinstance(module, fx.GraphModule):
        return Defaults(_of_graph(module))
    example = getattr(module, "example_input_array", None)  # of a LightningModule
    return Defaults(example=example)


@contextlib.contextmanager
def exportable(module: nn.Module) -> Iterator[None]:
    """Use batched instead of grouped products in a mixture of experts of transformers: ONNX has no grouped ones."""
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


def settle(module: nn.Module) -> None:
    """Install the hooks with which a model of transformers collects hidden states for itself, as SegFormer does.

    It would install them in its first call, which would look as if each call changed the model.
    """
    if not hasattr(module, "main_input_name") or "@filter_output_hidden_states" not in _forward(module):
        return
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for part in module.modules():
        if part is not module and getattr(part, "_can_record_outputs", None):
            maybe_install_capturing_hooks(part)  # type: ignore[arg-type]


def _forward(module: nn.Module) -> str:
    """Return the source of a model's ``forward``; empty if there is none."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(inspect.unwrap(module.forward))
    return ""


@contextlib.contextmanager
def checking_targets() -> Iterator[None]:
    """Check the targets of ``ctc_loss``: for targets beyond the classes its kernel may end the process."""
    loss: Any = torch.ctc_loss

    def checked(log_probs: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = torch.compiler.is_compiling() or not targets.numel()
        if not known and not 0 <= targets.min() <= targets.max() < log_probs.shape[-1]:
            raise IndexError(f"a target of ctc_loss is not among the {log_probs.shape[-1]} classes")
        return loss(log_probs, targets, *args, **kwargs)

    torch.ctc_loss = checked
    try:
        yield
    finally:
        torch.ctc_loss = loss


def _of_transformer(module: Any) -> Defaults:
    parameters = inspect.signature(module.forward).parameters
    # A cache is a Python object, which clients cannot send; the user can name its tensors.
    constants = {"use_cache": False} if "use_cache" in parameters else {}
    text = getattr(module.config, "get_text_config", lambda: module.config)()
    longest = getattr(text, "max_position_embeddings", None)
    bound = f"=1..{longest}" if isinstance(longest, int) and longest > 1 else ""
    inputs: list[str] = []
    folder = Path(str(getattr(module, "name_or_path", "")))
    produced = _produced(folder)
    if module.main_input_name == "input_ids":
        inputs.append(f"input_ids:int64[batch,seq{bound}]")
        if "attention_mask" in parameters:
            inputs.append(f"attention_mask:int64[batch,seq{bound}]")
        if "token_type_ids" in parameters and "token_type_ids" in produced:
            inputs.append(f"token_type_ids:int64[batch,seq{bound}]")
        if "decoder_input_ids" in parameters:
            inputs.append(f"decoder_input_ids:int64[batch,target{bound}]")
    elif module.main_input_name == "pixel_values":
        vision = getattr(module.config, "vision_config", module.config)
        size = getattr(vision, "image_size", None)
        channels = getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        if isinstance(height, int):
            inputs.append(f"pixel_values:float32[batch,{channels},{height},{width}]")
    elif of_sounds := sounds.inputs_of(module, folder):
        # All that the feature extractor makes; the tokenizer is for the answers.
        inputs, produced = of_sounds, ()
    others = {
        name: _PRODUCED + (_DECLARE if name in parameters else "the model does not accept it") for name in produced
    }
    if not produced and "token_type_ids" in parameters:
        others["token_type_ids"] = "no tokenizer in the folder declares it; for pairs of texts, " + _DECLARE
    return Defaults(tuple(inputs), constants=constants, others=others)


def _produced(folder: Path) -> tuple[str, ...]:
    """Return the names of the tensors that the tokenizer and the processor in a transformers folder declare."""
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
        stated = (config.get("model_input_names"), *map(_declared, classes))
        names += next((list(map(str, item)) for item in stated if isinstance(item, list | tuple)), [])
    return tuple(dict.fromkeys(names))


def _declared(item: Any) -> Any:
    """Return the names of tensors that a class declares; None if a package that it needs is not installed."""
    with contextlib.suppress(ImportError):
        return getattr(item, "model_input_names", None)
    return None


def _of_graph(module: fx.GraphModule) -> tuple[str, ...]:
    """Describe the placeholders of a captured graph; the first dynamic dimension is assumed to be the batch."""
    names: dict[str, str] = {}
    described = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        shape = [_dimension(size, axis, names) for axis, size in enumerate(value.shape)]
        described.append(f"{node.name}:{str(value.dtype).removeprefix('torch.')}[{','.join(shape)}]")
    return tuple(described)


def _dimension(size: object, axis: int, names: dict[str, str]) -> str:
    if isinstance(size, int):
        return str(size)
    symbol = str(size)
    if symbol not in names:
        names[symbol] = "batch" if axis == 0 and "batch" not in names.values() else f"dim{len(names)}"
    return names[symbol]
