"""Classifiers of sounds and recognizers of speech in folders of transformers: their steps, and the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.export.program import quiet
from ingot.export.source.sounds import least_samples
from ingot.export.tasks.folder import Folder, Found, classes_of, labels_of
from ingot.steps import Described, Original, Values, audio_classification, speech_recognition
from ingot.steps.after.ctc import Convolution
from ingot.steps.sounds.audio import Audio
from ingot.steps.sounds.extractors import Extraction, extraction_of
from ingot.steps.sounds.synthesis import synthesized
from ingot.steps.tokenizer import CLEANED
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

# Files that have a feature extractor: of it alone, or of a processor.
_FILES = ("preprocessor_config.json", "processor_config.json")
# Sounds whose values are compared, and those whose answers are.
_HARD, _SAMPLES = 60, 50


def find_classifier(folder: Folder, *, named: bool) -> Found | None:
    """Return a classifier of sounds; see :func:`ingot.export.tasks.find`."""
    if folder.architecture not in _architectures("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"):
        if named:
            raise folder.needs("audio-classification", "a model that classifies sounds")
        return None
    return Found("audio-classification", folder.why, folder.path, lambda module: _classify(module, folder.path))


def find_recognizer(folder: Folder, *, named: bool) -> Found | None:
    """Return a recognizer of speech; see :func:`ingot.export.tasks.find`."""
    task: Literal["automatic-speech-recognition"] = "automatic-speech-recognition"
    if folder.architecture in _architectures("MODEL_FOR_CTC_MAPPING_NAMES"):
        return Found(task, folder.why, folder.path, lambda module: _recognize(module, folder.path))
    if not named:
        return None
    if folder.architecture in _architectures("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"):
        raise InvalidArgument(
            f"{folder.architecture} makes its text token by token, in many calls of its graph; the steps of {task} are "
            "for models with CTC, such as Wav2Vec2ForCTC: export the graph alone (--task none)"
        )
    raise folder.needs(task, "a model with CTC, such as Wav2Vec2ForCTC")


def _architectures(mapping: str) -> Iterable[str]:
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = getattr(modeling_auto, mapping)
    return found.values()


def _classify(module: Any, folder: Path) -> Described:
    extractor, name = _extractor(folder)
    config, extraction = module.config, extraction_of(extractor)
    labels = labels_of(config)
    # As transformers' pipeline chooses it, which has softmax for a single class too.
    functions = {"regression": "none", "multi_label_classification": "sigmoid"}
    function: Any = functions.get(config.problem_type, "softmax")
    options = _options(extraction, extractor, module, name)
    described = audio_classification(labels, function=function, **options)

    def answer(module: Any, rows: list[Array]) -> Values:
        import transformers

        kind: Any = transformers.AudioClassificationPipeline
        pipeline = kind(model=module, feature_extractor=extractor, device="cpu")
        return classes_of([pipeline(samples, top_k=config.num_labels) for samples in rows])

    return _with_original(described, Audio(**options), extractor, extraction, answer)


def _recognize(module: Any, folder: Path) -> Described:
    extractor, name = _extractor(folder)
    extraction, tokenizer = extraction_of(extractor), _tokenizer(folder)
    convolutions = _convolutions(module)
    options = _options(extraction, extractor, module, name)
    described = speech_recognition(
        [str(token) for token in tokenizer.convert_ids_to_tokens([*range(module.config.vocab_size)])],
        blank=str(tokenizer.pad_token),
        delimiter=str(tokenizer.word_delimiter_token),
        space=str(tokenizer.replace_word_delimiter_char),
        lower=bool(tokenizer.do_lower_case),
        replaced=CLEANED if tokenizer.clean_up_tokenization_spaces else (),
        convolutions=convolutions if extraction.masked else (),
        **options,
    )

    def answer(module: Any, rows: list[Array]) -> Values:
        import transformers

        kind: Any = transformers.AutomaticSpeechRecognitionPipeline
        pipeline = kind(model=module, feature_extractor=extractor, tokenizer=tokenizer, device="cpu")
        return {"text": as_bytes([pipeline(samples)["text"].encode() for samples in rows])}

    return _with_original(described, Audio(**options), extractor, extraction, answer)


def _extractor(folder: Path) -> tuple[Any, str]:
    """Return the folder's feature extractor, and its name with the version of transformers."""
    import transformers

    if not any((folder / name).is_file() for name in _FILES):
        raise Unsupported(
            f"{folder} has no feature extractor ({' or '.join(_FILES)}): save it with "
            "extractor.save_pretrained(FOLDER), or export the model without steps (--task none)"
        )
    loader: Any = transformers.AutoFeatureExtractor
    found = _loaded(loader, folder, "feature extractor")
    return found, f"transformers {transformers.__version__} {type(found).__name__}"


def _tokenizer(folder: Path) -> Any:
    import transformers

    loader: Any = transformers.AutoTokenizer
    found = _loaded(loader, folder, "tokenizer")
    if type(found).__name__ != "Wav2Vec2CTCTokenizer":
        raise Unsupported(
            f"the tokenizer in {folder} ({type(found).__name__}) makes texts of tokens in another way than "
            "Wav2Vec2CTCTokenizer, which has steps: export the model without steps (--task none)"
        )
    return found


def _loaded(loader: Any, folder: Path, what: str) -> Any:
    def unread(error: Exception) -> str:
        return f"the {what} in {folder} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet():
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _options(extraction: Extraction, extractor: Any, module: Any, name: str) -> dict[str, Any]:
    """Return the fields of the step before the graph."""
    frames = extraction.least
    if extraction.values == "input_values" and hasattr(module.config, "conv_kernel"):
        frames = max(frames, least_samples(module.config))
    return {
        "rate": extractor.sampling_rate,
        "operations": extraction.operations,
        "values": extraction.values,
        "attention_mask": "attention_mask" if extraction.masked else "",
        "padding": extractor.padding_value,
        "least": frames,
        "reference": name,
    }


def _convolutions(module: Any) -> tuple[Convolution, ...]:
    """Return the convolutions over time by which a model shortens its input."""
    config = module.config
    if not hasattr(config, "conv_kernel"):  # Wav2Vec2-BERT
        kernel = int(config.adapter_kernel_size)
        adapter: Convolution = (kernel, int(config.adapter_stride), kernel // 2)
        return (adapter,) * (config.num_adapter_layers if config.add_adapter else 0)
    found = [(kernel, stride, 0) for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True)]
    if getattr(config, "add_adapter", False):
        found += [(1, config.adapter_stride, 0)] * config.num_adapter_layers
    return tuple(found)


def _with_original(
    described: Described,
    step: Audio,
    extractor: Any,
    extraction: Extraction,
    answer: Callable[[Any, list[Array]], Values],
) -> Described:
    """Return the steps with their originals: the extractor and the pipeline, given the same samples."""
    step.item()

    def rows(values: Values) -> list[Array]:
        return [step.samples(content) for content in values[step.audio].tolist()]

    def prepare(values: Values) -> Values:
        options = {"padding": True} if extraction.masked else {}
        found = extractor(rows(values), sampling_rate=step.rate, return_tensors="np", **options)
        return {name: np.asarray(array) for name, array in found.items()}

    def sets(files: Iterable[bytes]) -> list[Values]:
        """Return one set, of which several share a call, or one for each where none can."""
        alone = [as_bytes([file]) for file in files]
        fixed = extraction.masked or any(each.operation == "fit" for each in step.operations)
        return [{step.audio: np.concatenate(alone)}] if fixed else [{step.audio: each} for each in alone]

    least = step.least / step.rate + 0.001
    items, samples = sets(synthesized(_HARD, least=least)), sets(synthesized(_SAMPLES, seed=1, least=least))
    return replace(
        described,
        original=Original(
            step.reference,
            prepare,
            lambda module, values: answer(module, rows(values)),
            items,
            samples,
            extraction.bound,
        ),
    )
