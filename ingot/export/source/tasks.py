"""The task of a folder of transformers or sentence-transformers, and the steps that its answers need."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.nn import functional

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.export.program import quiet
from ingot.export.proof import texts
from ingot.export.source import pictures
from ingot.steps import Described, Original, Values, embedding, text_classification, text_ranking
from ingot.steps.dense import Dense
from ingot.steps.normalize import Normalize
from ingot.steps.pool import Mode
from ingot.tensors import Array

Task = Literal["auto", "none", "text-classification", "text-ranking", "sentence-similarity", "image-classification"]
_FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}
# Patterns of files that have the words of a tokenizer. Without one, transformers makes an empty tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.vocab", "*.tiktoken")
_OWN = "config_sentence_transformers.json"
_POOLED: Mapping[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Found:
    """A folder's task: why it is that, the folder of the transformers model, and how its steps are described."""

    task: Task
    why: str
    folder: Path
    describe: Callable[[Any], Described]


def find(folder: Path, task: Task = "auto") -> Found | None:
    """Return the task of a folder; None if it has no task that steps are known for.

    Args:
        folder: a folder of transformers or sentence-transformers.
        task: ``auto`` finds it from the files, ``none`` looks for none.

    Raises:
        InvalidArgument: a file is damaged, the task does not fit the folder, or a module of sentence-transformers has
            no step.
    """
    if task == "none" or not folder.is_dir():
        return None
    config = _json(folder / "config.json") | _json(folder / _OWN)
    crossed = _is_cross_encoder(config)
    if (folder / "modules.json").is_file() and task in ("auto", "sentence-similarity") and not crossed:
        return _of_modules(folder)
    names = config.get("architectures") or [""]
    classifier = str(names[0]).endswith("ForSequenceClassification")
    labels = config.get("id2label") or {}
    why = f"config: id2label with {len(labels)} names" if labels else f"config: {names[0]}"
    if pictures.fits(folder, str(names[0]), task):
        return Found("image-classification", why, folder, lambda module: pictures.describe(module, folder))
    if task == "auto":
        if not classifier:
            return None
        task = "text-ranking" if crossed else "text-classification"
    if task == "sentence-similarity":
        if classifier:
            raise InvalidArgument(
                f"task {task} needs a model that returns a vector of each token; {folder} has {names[0]}, which "
                "classifies: its tasks are text-classification and text-ranking"
            )
        return Found(task, "no modules.json: mean pooling", folder, lambda module: _embedding(module, folder, "mean"))
    if not classifier:
        raise InvalidArgument(
            f"task {task} needs a model ...ForSequenceClassification; {folder} has {names[0] or 'none'}"
        )
    if task == "text-ranking":
        return Found(task, why, folder, lambda module: _ranking(module, folder, _activation(config)))
    return Found(task, why, folder, lambda module: _classification(module, folder))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read: {foreign.one_line(error)}") from error
    return found if isinstance(found, dict) else {"": found}


def _is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether sentence-transformers wrote a cross-encoder: since its version 6 it says so in a separate file."""
    keys = ("sentence_transformers", "sbert_ce_default_activation_function")
    return config.get("model_type") == "CrossEncoder" or any(key in config for key in keys)


def _activation(config: Mapping[str, Any]) -> str | None:
    """Return the activation that a cross-encoder's configuration names; None if it names none."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or config.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    return None if name is None else str(name).rpartition(".")[2]


class _Tokenizer:
    """The tokenizer of a folder as transformers loads it."""

    def __init__(self, folder: Path, module: Any, **options: Any):
        import transformers

        def unread(error: Exception) -> str:
            return f"the tokenizer in {folder} cannot be loaded: {foreign.one_line(error)}"

        with foreign.reported_as(InvalidArgument, unread), quiet():
            self.own: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES) or len(self.own) <= len(
            self.own.all_special_ids
        ):
            raise Unsupported(
                f"{folder} has no words of a tokenizer ({', '.join(_VOCABULARIES)}); save it with "
                "tokenizer.save_pretrained(FOLDER), or export the model without steps (--task none)"
            )
        if not getattr(self.own, "is_fast", False):
            raise Unsupported(
                f"the tokenizer in {folder} ({type(self.own).__name__}) is Python code, which an archive cannot hold; "
                "export the model without steps (--task none)"
            )
        if self.own.pad_token is None:
            raise Unsupported(
                f"the tokenizer in {folder} has no pad token, with which texts of different lengths share a batch; set "
                "one before it is saved, or export the model without steps (--task none)"
            )
        self.name = f"transformers {transformers.__version__}"
        self.max_length = _max_length(self.own, module)
        if (own := options.pop("max_length", None)) is not None:
            self.max_length = min(self.max_length, own)
        self._options = options

    @property
    def content(self) -> bytes:
        """The serialization of the loaded tokenizer, which may differ from ``tokenizer.json``."""
        from tokenizers import Tokenizer

        copy: Any = Tokenizer.from_str(self.own.backend_tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        return str(copy.to_str()).encode()

    @property
    def options(self) -> dict[str, Any]:
        """The fields of the step."""
        own = self.own
        return {
            "max_length": self.max_length,
            "pad_id": own.pad_token_id or 0,
            "pad_type": own.pad_token_type_id or 0,
            "padding_side": own.padding_side,
            "truncation_side": own.truncation_side,
            **self._options,
        }

    def prepare(self, values: Values, kind: str = "np") -> Any:
        """Return the tensors that transformers makes of texts."""
        found = {name: [item.decode() for item in array.tolist()] for name, array in values.items()}
        rows = found.pop("text")
        prompt = self._options.get("prompts", {}).get(self._options.get("default_prompt", ""), "")
        rows = [prompt + text for text in rows]
        if self._options.get("lower"):
            rows = [text.lower() for text in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.own(
                rows,
                **found,
                padding=True,
                truncation="longest_first",
                max_length=self.max_length,
                return_tensors=kind,
            )

    def original(
        self, answer: Callable[[Any, Values], Values], pairs: Literal["no", "optional", "required"] = "no"
    ) -> Original:
        """Return the work of transformers, with which the steps are compared."""
        pair = "" if pairs == "no" else "text_pair"
        items, samples = (
            texts.sets(each, "text", pair, required=pairs == "required") for each in (texts.hard(), texts.samples())
        )
        return Original(self.name, self.prepare, answer, items, samples)


def _max_length(tokenizer: Any, module: Any) -> int:
    """Return the most tokens of a row: positions of some models start behind the id of padding."""
    longest = getattr(module.config, "max_position_embeddings", None)
    known = [tokenizer.model_max_length] if tokenizer.model_max_length < 1 << 20 else []
    if isinstance(longest, int) and longest > 1:
        shifted = any(hasattr(item, "create_position_ids_from_input_ids") for item in module.modules())
        known.append(longest - (module.config.pad_token_id or 0) - 1 if shifted else longest)
    return int(min(known, default=512))


def _classification(module: Any, folder: Path) -> Described:
    tokenizer, config = _Tokenizer(folder, module), module.config
    labels = [str(config.id2label[index]) for index in range(config.num_labels)]
    function: Literal["softmax", "sigmoid", "none"] = "softmax"
    if config.problem_type == "regression":
        function = "none"
    elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
        function = "sigmoid"

    def answer(module: Any, values: Values) -> Values:
        import transformers

        made: Any = transformers.TextClassificationPipeline
        columns = {name: [item.decode() for item in array.tolist()] for name, array in values.items()}
        rows = made(model=module, tokenizer=tokenizer.own, device="cpu")(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            top_k=None,
            truncation=True,
            max_length=tokenizer.max_length,
        )
        label: Array = np.array([[item["label"].encode() for item in row] for row in rows], dtype=np.dtype(object))
        return {"label": label, "score": np.array([[item["score"] for item in row] for row in rows], np.float32)}

    described = text_classification(tokenizer.content, labels, function=function, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer, "optional"))


def _ranking(module: Any, folder: Path, activation: str | None) -> Described:
    tokenizer, count = _Tokenizer(folder, module), module.config.num_labels
    if activation is not None and activation not in _FUNCTIONS:
        raise InvalidArgument(f"the activation {activation} of the cross-encoder in {folder} has no step (--task none)")
    function: Any = _FUNCTIONS[activation] if activation else ("sigmoid" if count == 1 else "none")

    def answer(module: Any, values: Values) -> Values:
        with torch.no_grad():
            logits = module(**tokenizer.prepare(values, "pt")).logits.float()
        if function == "sigmoid":
            logits = logits.sigmoid()
        elif function == "softmax":
            logits = logits.softmax(-1)
        return {"score": (logits[:, 0] if count == 1 else logits).numpy()}

    described = text_ranking(tokenizer.content, classes=count, function=function, **tokenizer.options)
    return replace(described, original=tokenizer.original(answer, "required"))


def _of_modules(folder: Path) -> Found:
    """Return the embedding that ``modules.json`` of sentence-transformers describes."""
    modules = _json(folder / "modules.json").get("", [])
    kinds = [(str(item.get("type", "")).rpartition(".")[2], folder / str(item.get("path", ""))) for item in modules]
    if not kinds or kinds[0][0] != "Transformer":
        raise InvalidArgument(f"{folder / 'modules.json'} does not begin with a Transformer, as embeddings of texts do")
    root = kinds[0][1]
    pooling: tuple[Mode, ...] = ()
    further: list[Dense | Normalize] = []
    files: dict[str, bytes] = {}
    for kind, place in kinds[1:]:
        if kind == "Pooling":
            pooling = _pooling(_json(place / "config.json"), place)
        elif kind == "Normalize":
            further.append(Normalize())
        elif kind == "Dense":
            further.append(_dense(place, files, len(further)))
        else:
            raise InvalidArgument(f"module {kind} of {folder} has no step; export the graph alone (--task none)")
    own = _json(folder / "config_sentence_transformers.json")
    sizes = _json(root / "sentence_bert_config.json")
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
    config = _json(place / "config.json")
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
    tokenizer = _Tokenizer(folder, module, **{**(options or {})})
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
