"""transformers' feature extractors as operations, field by field; an unknown class or field is refused.

Fields that the saved configuration lacks come from the extractor's class, so the extractor itself is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ingot.errors import Unsupported
from ingot.steps.sounds.mel import Mel
from ingot.steps.sounds.operations import (
    Fit,
    Floor,
    Normalize,
    Operation,
    Spectrogram,
    Stack,
    Standardize,
    Transpose,
)


class Extraction(NamedTuple):
    """What an extractor does.

    Attributes:
        operations: on the samples of one sound.
        values: the name of the graph's input that it makes.
        masked: whether it makes a mask, which is 0 for padding.
        least: samples that it needs.
        bound: the largest difference of a value from the extractor's own; 0 if they are equal to the last bit.
    """

    operations: tuple[Operation, ...]
    values: str
    masked: bool = False
    least: int = 1
    bound: float = 0


# PyTorch's Fourier transform is in float32, transformers' own and that of the steps in float64; values are about 1.
_FLOAT32_BOUND = 1e-3
# The smallest difference of float32 from 1: the least energy in Kaldi.
_EPSILON = 1.192092955078125e-07
_KALDI_FRAME, _KALDI_HOP, _KALDI_FFT = 400, 160, 512


def extraction_of(extractor: Any) -> Extraction:
    """Return the operations of a feature extractor of transformers.

    Raises:
        Unsupported: its class or one of its fields does more than the operations do.
    """
    name = type(extractor).__name__
    if (known := _CLASSES.get(name)) is None:
        raise Unsupported(f"the steps of {name} are not known; there are those of {', '.join(_CLASSES)}: send tensors")
    if extractor.padding_side != "right":
        raise Unsupported(f"{name} pads at the {extractor.padding_side}; the steps pad at the right: send tensors")
    if getattr(extractor, "dither", 0):
        raise Unsupported(f"{name} adds noise (dither), which steps do not: set it to 0, or send tensors")
    return known(extractor)


def _samples(extractor: Any) -> Extraction:
    if extractor.feature_size != 1:
        raise Unsupported(
            f"{type(extractor).__name__} has {extractor.feature_size} features for a sample: send tensors"
        )
    operations = (Normalize(),) if extractor.do_normalize else ()
    return Extraction(operations, "input_values", bool(extractor.return_attention_mask))


def _whisper(extractor: Any) -> Extraction:
    mel = Mel(bands=extractor.feature_size, highest=8000, scale="slaney", equal_area=True)
    if extractor.return_attention_mask:
        raise Unsupported("WhisperFeatureExtractor with return_attention_mask is not known: set it to false")
    spectrogram = Spectrogram(
        frame=extractor.n_fft,
        hop=extractor.hop_length,
        fft=extractor.n_fft,
        without_last=True,
        mel=mel,
        log="log10",
    )
    fit = Fit(size=extractor.n_samples, value=extractor.padding_value)
    operations = (fit, spectrogram, Floor(below=8), Standardize(mean=-4, std=4), Transpose())
    return Extraction(operations, "input_features", bound=_FLOAT32_BOUND)


def _kaldi(extractor: Any, window: Any) -> Spectrogram:
    rate = extractor.sampling_rate
    mel = Mel(bands=extractor.num_mel_bins, lowest=20, highest=rate // 2, scale="kaldi", triangles_in_mel=True)
    return Spectrogram(
        frame=_KALDI_FRAME,
        hop=_KALDI_HOP,
        fft=_KALDI_FFT,
        window=window,
        periodic=False,
        centered=False,
        remove_offset=True,
        preemphasis=0.97,
        mel=mel,
        floor=_EPSILON,
        log="log",
    )


def _audio_spectrogram_transformer(extractor: Any) -> Extraction:
    from transformers.utils.import_utils import is_speech_available

    def operations() -> Iterator[Operation]:
        yield _kaldi(extractor, "hann")
        yield Fit(size=extractor.max_length)
        if extractor.do_normalize:
            yield Standardize(mean=extractor.mean, std=extractor.std * 2)

    # With torchaudio, transformers does not use its own spectrogram.
    bound = _FLOAT32_BOUND if is_speech_available() else 0
    return Extraction(tuple(operations()), "input_values", least=_KALDI_FRAME, bound=bound)


def _seamless(extractor: Any) -> Extraction:
    scale = Standardize(std=2**-15)  # to integers of 16 bits, as in Kaldi
    operations = (scale, _kaldi(extractor, "povey"), Normalize(each_band=True, correction=1))
    stack = Stack(count=extractor.stride, value=extractor.padding_value)
    # The deviation of one frame is not defined.
    return Extraction((*operations, stack), "input_features", masked=True, least=_KALDI_FRAME + _KALDI_HOP)


_CLASSES: dict[str, Callable[[Any], Extraction]] = {
    "ASTFeatureExtractor": _audio_spectrogram_transformer,
    "SeamlessM4TFeatureExtractor": _seamless,
    "SpeechT5FeatureExtractor": _samples,
    "Wav2Vec2FeatureExtractor": _samples,
    "WhisperFeatureExtractor": _whisper,
}
