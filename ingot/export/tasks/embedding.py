"""Embeddings of texts: folders of sentence-transformers, or any model that returns a vector of each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional

from ingot import foreign
from ingot.errors import InvalidArgument
from ingot.export.tasks.folder import Folder, Found, read_json
from ingot.export.tasks.tokenizer import FolderTokenizer
from ingot.steps import Described, Values, embedding
from ingot.steps.after.dense import Dense
from ingot.steps.after.normalize import Normalize
from ingot.steps.after.pool import Mode
from ingot.tensors import Array

_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}
_POOLED: Mapping[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def find_embedding(folder: Folder, *, named: bool) -> Found | None:
    """Return an embedding; see :func:`ingot.export.tasks.find`."""
    path = folder.path
    if (path / "modules.json").is_file() and not folder.is_cross_encoder:
        return _of_modules(path)
    if not named:
        return None
    if folder.architecture.endswith("ForSequenceClassification"):
        raise InvalidArgument(
            f"task sentence-similarity needs a model that returns a vector of each token; {path} has "
            f"{folder.architecture}, which classifies: its tasks are text-classification and text-ranking"
        )
    why = "no modules.json: mean pooling"
    return Found("sentence-similarity", why, path, lambda module: _embedding(module, path, "mean"))


def _of_modules(folder: Path) -> Found:
    """Return the embedding that ``modules.json`` of sentence-transformers describes."""
    modules = read_json(folder / "modules.json").get("", [])
    kinds = [(str(item.get("type", "")).rpartition(".")[2], folder / str(item.get("path", ""))) for item in modules]
    if not kinds or kinds[0][0] != "Transformer":
        raise InvalidArgument(f"{folder / 'modules.json'} does not begin with a Transformer, as embeddings of texts do")
    root = kinds[0][1]
    pooling: tuple[Mode, ...] = ()
    further: list[Dense | Normalize] = []
    files: dict[str, bytes] = {}
    for kind, place in kinds[1:]:
        if kind == "Pooling":
            pooling = _pooling(read_json(place / "config.json"), place)
        elif kind == "Normalize":
            further.append(Normalize())
        elif kind == "Dense":
            further.append(_dense(place, files, len(further)))
        else:
            raise InvalidArgument(f"module {kind} of {folder} has no step; export the graph alone (--task none)")
    own = Folder(folder).own
    sizes = read_json(root / "sentence_bert_config.json")
    prompts = {str(name): str(text) for name, text in (own.get("prompts") or {}).items() if text}
    default = str(own.get("default_prompt_name") or "")
    options: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt": default if default in prompts else "",
        "lower": bool(sizes.get("do_lower_case")),
        "max_length": sizes.get("max_seq_length"),
    }
    why = f"modules.json: {', '.join(kind for kind, _ in kinds)}"
    return Found(
        "sentence-similarity",
        why,
        root,
        lambda module: _embedding(module, root, pooling or "mean", further, files, options),
    )


def _pooling(config: Mapping[str, Any], place: Path) -> tuple[Mode, ...]:
    if config.get("include_prompt") is False:
        raise InvalidArgument(f"{place} leaves prompts out of the pooling, which has no step (--task none)")
    if (stated := config.get("pooling_mode")) is not None:
        names = [stated] if isinstance(stated, str) else list(stated)
    else:
        names = [name for key, name in _POOLED.items() if config.get(key)] or ["mean"]
    unknown = [name for name in names if name not in _POOLED.values()]
    if unknown:
        raise InvalidArgument(f"pooling {unknown[0]} of {place} has no step; export the graph alone (--task none)")
    return tuple(cast(list[Mode], names))


def _dense(place: Path, files: dict[str, bytes], index: int) -> Dense:
    """Return the step of a Dense module, and put its weights into ``files``."""
    config = read_json(place / "config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise InvalidArgument(f"the activation {name} of {place} has no step; export the graph alone (--task none)")
    weights = _weights(place)
    names = {}
    for key in ("weight", "bias"):
        if (found := weights.get(f"linear.{key}")) is not None:
            names[key], raw = f"dense{index}.{key}.npy", BytesIO()
            np.save(raw, found.float().numpy())
            files[names[key]] = raw.getvalue()
    if "weight" not in names:
        raise InvalidArgument(f"{place} has no linear.weight")
    return Dense(weight=names["weight"], bias=names.get("bias", ""), activation=_ACTIVATIONS[name])


def _weights(place: Path) -> Mapping[str, torch.Tensor]:
    with foreign.reported_as(InvalidArgument, f"the weights in {place} cannot be read"):
        if (file := place / "model.safetensors").is_file():
            from safetensors.torch import load_file

            return load_file(file)
        found: Mapping[str, torch.Tensor] = torch.load(place / "pytorch_model.bin", weights_only=True)
        return found


def _embedding(
    module: Any,
    folder: Path,
    pooling: Mode | tuple[Mode, ...],
    further: list[Dense | Normalize] | None = None,
    files: Mapping[str, bytes] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Described:
    tokenizer = FolderTokenizer(folder, module, **{**(options or {})})
    modes = (pooling,) if isinstance(pooling, str) else pooling
    steps, held = further or [], files or {}
    dense = [(step, *_linear(step, held)) for step in steps if isinstance(step, Dense)]
    size = len(dense[-1][1]) if dense else module.config.hidden_size * len(modes)

    def answer(module: Any, values: Values) -> Values:
        inputs = tokenizer.prepare(values, "pt")
        with torch.no_grad():
            tokens, mask = module(**inputs)[0].float(), inputs["attention_mask"]
            vectors = torch.cat([_POOLINGS[mode](tokens, mask[:, :, None].float()) for mode in modes], 1)
            layers = iter(dense)
            for step in steps:
                if isinstance(step, Normalize):
                    vectors = functional.normalize(vectors, p=2, dim=1)
                else:
                    _, weight, bias = next(layers)
                    activate = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
                    vectors = functional.linear(vectors, weight, bias)
                    vectors = activate.get(step.activation, lambda x: x)(vectors)
        return {"embedding": vectors.numpy()}

    described = embedding(tokenizer.content, size, pooling=modes, further=steps, files=held, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer))


def _linear(step: Dense, files: Mapping[str, bytes]) -> tuple[torch.Tensor, torch.Tensor | None]:
    def load(name: str) -> torch.Tensor:
        array: Array = np.load(BytesIO(files[name]), allow_pickle=False)
        return torch.from_numpy(array)

    return load(step.weight), load(step.bias) if step.bias else None


def _last(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(tokens))
    last = mask.shape[1] - 1 - mask[:, :, 0].flip(1).argmax(1)
    return (tokens * mask)[rows, last]


def _weighted(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask * torch.arange(1, mask.shape[1] + 1)[None, :, None]
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _mean(tokens: torch.Tensor, mask: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    return (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9) ** power


# sentence-transformers' rules, in PyTorch: the steps that run are in numpy.
_POOLINGS: Mapping[Mode, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda tokens, mask: tokens[torch.arange(len(tokens)), mask[:, :, 0].argmax(1)],
    "max": lambda tokens, mask: tokens.masked_fill(mask == 0, -1e9).max(1).values,
    "mean": _mean,
    "mean_sqrt_len_tokens": functools.partial(_mean, power=0.5),
    "weightedmean": _weighted,
    "lasttoken": _last,
}
