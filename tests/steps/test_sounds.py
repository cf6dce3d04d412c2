"""Sounds from files to values: decoding, transformers' extractors, padding, and texts of CTC."""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from pydantic import ValidationError

from ingot.errors import InvalidArgument, TooLarge, Unsupported
from ingot.steps import Steps, audio_classification, speech_recognition
from ingot.steps.after.ctc import Ctc
from ingot.steps.sounds.audio import Audio
from ingot.steps.sounds.decoding import Limits
from ingot.steps.sounds.extractors import extraction_of
from ingot.steps.sounds.mel import Mel, filters
from ingot.steps.sounds.operations import Fit, Normalize, Spectrogram, Stack, Transpose
from ingot.steps.sounds.synthesis import synthesized
from ingot.steps.tasks.declared import read_steps
from ingot.tensors import Array
from tests.support import ROOT

RATE = 16_000
NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, RATE).astype(np.float32)


def run(step: Audio, *contents: object) -> Mapping[str, Array]:
    return step.open(lambda name: b"")({"audio": np.array([*contents, None], object)[:-1]})


def file_of(samples: Array, rate: int = RATE, kind: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.fixture(name="step")
def _step() -> Audio:
    return Audio(rate=RATE)


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("WAV", "PCM_U8", 2**-7),
        ("WAV", "PCM_16", 2**-15),
        ("WAV", "PCM_24", 2**-23),
        ("WAV", "PCM_32", 2**-23),
        ("WAV", "FLOAT", 0),
        ("WAVEX", "PCM_16", 2**-15),
        ("RF64", "PCM_16", 2**-15),
        ("FLAC", "PCM_16", 2**-15),
        ("FLAC", "PCM_24", 2**-23),
    ],
)
def test_formats_keep_the_samples(step: Audio, kind: str, subtype: str, error: float) -> None:
    found = run(step, file_of(NOISE, kind=kind, subtype=subtype))
    assert np.abs(found["input_values"][0] - NOISE).max() <= error
    assert found["seconds"].tolist() == [1]
    assert found["cut_seconds"].tolist() == [0]


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_lossy_formats_are_decoded(step: Audio, subtype: str) -> None:
    tone = np.sin(np.arange(RATE) * 0.1).astype(np.float32) * 0.5
    found = run(step, file_of(tone, kind="OGG", subtype=subtype))["input_values"][0]
    assert len(found) == RATE
    assert np.corrcoef(found[2000:-2000], tone[2000:-2000])[0, 1] > 0.99


def test_channels_become_one(step: Audio) -> None:
    stereo = np.stack([NOISE, NOISE[::-1]], axis=1)
    assert np.array_equal(run(step, file_of(stereo))["input_values"][0], stereo.mean(1))
    first = Audio(rate=RATE, mix="first")
    assert np.array_equal(run(first, file_of(stereo))["input_values"][0], NOISE)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_other_rates_are_resampled(step: Audio, rate: int) -> None:
    time = np.arange(rate) / rate
    found = run(step, file_of((0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32), rate))["input_values"][0]
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(found) == RATE
    assert np.abs(found - expected)[1000:-1000].max() < 1e-3


def test_base64_is_the_form_of_files_in_json(step: Audio) -> None:
    for kind, subtype in (("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("RF64", "FLOAT")):
        content = file_of(NOISE, kind=kind, subtype=subtype)
        text = base64.b64encode(content)
        for form in (text, b"data:audio/wav;base64," + text):
            assert np.array_equal(run(step, form)["input_values"], run(step, content)["input_values"])
        with pytest.raises(InvalidArgument, match="is base64 that is not valid"):
            run(step, text + b"?")


def _changed(content: bytes, at: int, value: bytes) -> bytes:
    return content[:at] + value + content[at + len(value) :]


_WAV, _FLAC = file_of(NOISE, subtype="PCM_16"), file_of(NOISE, kind="FLAC", subtype="PCM_16")
_OGG = file_of(NOISE, kind="OGG", subtype="VORBIS")
_STATED = 22  # where a FLAC states its samples, in the lowest 32 bits


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", InvalidArgument, "element 0 of input 'audio' is empty: send the bytes of a file"),
        (b"%PDF-1.7 ...", InvalidArgument, r"is not a WAV, FLAC or OGG .* file; its first bytes are b'%PDF-1.7'"),
        (b"ID3\x04" + bytes(99), InvalidArgument, "is not a WAV, FLAC or OGG"),
        (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(99), InvalidArgument, "is damaged or truncated: "),
        (_WAV[:-100], InvalidArgument, "is a truncated WAV: its end is missing"),
        (_WAV[:40], InvalidArgument, "is damaged or truncated"),
        (_FLAC[:-3000], InvalidArgument, "is damaged or truncated"),
        (_OGG[:-200], InvalidArgument, "is (a truncated OGG|damaged or truncated)"),
        (_changed(_WAV, 24, bytes(4)), InvalidArgument, "has a rate of 0 Hz"),
        (_changed(_WAV, 24, struct.pack("<I", 7)), InvalidArgument, "has a rate of 7 Hz; those of sounds are"),
        (file_of(NOISE[:0]), InvalidArgument, "has no samples"),
        (file_of(np.where(np.arange(RATE) == 5, np.nan, NOISE)), InvalidArgument, "NaN or infinite"),
        (file_of(np.where(np.arange(RATE) == 5, np.inf, NOISE)), InvalidArgument, "NaN or infinite"),
        (file_of(np.zeros((100, 300))), TooLarge, "has 300 channels; the most are 8"),
        (file_of(np.zeros(61 * 8000), 8000), TooLarge, "has 61.0 seconds; the most are 60: send a shorter part"),
        (file_of(np.zeros((600_000, 8)), 768_000), TooLarge, "has 4800000 samples in all channels; the most are 40000"),
        (_changed(_FLAC, _STATED, struct.pack(">I", 36_000 * RATE)), TooLarge, "has 36000.0 seconds; the most are 60"),
        (_changed(_FLAC, _STATED, bytes(4)), InvalidArgument, "does not state its length"),
        (bytes((50 << 20) + 1), TooLarge, "has 52428801 bytes; the most are 52428800"),
    ],
    ids=[
        "empty", "PDF", "MP3", "WebP", "short WAV", "header", "short FLAC", "short OGG", "0 Hz", "7 Hz", "no samples",
        "NaN", "infinity", "channels", "seconds", "samples", "10 hours", "no length", "bytes",
    ],
)  # fmt: skip
def test_what_is_not_a_sound_is_refused(content: bytes, kind: type[Exception], message: str) -> None:
    step = Audio(rate=RATE, limits=Limits(samples=4_000_000))
    with pytest.raises(kind, match=message.replace("are 40000", "are 4000000")):
        run(step, content)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_named_with_its_install_line(
    step: Audio, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unsupported, match=rf"decoding sounds needs the package '{package}'.* 'ingot-serve\[audio\]'"):
        step.open(lambda name: b"")


def test_a_wav_that_was_written_to_a_pipe_has_its_samples(step: Audio) -> None:
    assert len(run(step, _changed(_WAV, 40, b"\xff" * 4))["input_values"][0]) == RATE


def test_the_element_that_is_refused_is_named() -> None:
    step = Audio(rate=RATE, least=400)
    with pytest.raises(InvalidArgument, match="element 1 of input 'audio' is not a WAV"):
        run(step, _WAV, b"text")
    with pytest.raises(InvalidArgument, match=r"element 0 of input 'audio' has 399 samples at 16000 Hz; .* needs 400"):
        run(step, file_of(NOISE[:399]))


def test_sounds_of_several_lengths_are_extended_beside_a_mask_or_refused(step: Audio) -> None:
    both = file_of(NOISE), file_of(NOISE[:9000])
    masked = run(Audio(rate=RATE, attention_mask="attention_mask", padding=0.5), *both)
    assert masked["attention_mask"].sum(1).tolist() == [RATE, 9000]
    assert np.array_equal(masked["input_values"][1, :9000], NOISE[:9000])
    assert (masked["input_values"][1, 9000:] == 0.5).all()
    assert masked["seconds"].tolist() == [1, 0.5625]
    with pytest.raises(InvalidArgument, match=r"from 0\.562 to 1\.000 seconds; the model has no mask"):
        run(step, *both)
    few = Audio(rate=RATE, attention_mask="attention_mask", limits=Limits(samples=RATE))
    with pytest.raises(TooLarge, match="have 32000 values once they have one length; the most are 16000: divide"):
        run(few, *both)


def test_seconds_that_operations_cut_off_are_told() -> None:
    found = run(Audio(rate=RATE, operations=(Fit(size=4000),)), _WAV)
    assert found["input_values"].shape == (1, 4000)
    assert found["cut_seconds"].tolist() == [0.75]


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [
        ("Wav2Vec2FeatureExtractor", {}, 0),
        ("Wav2Vec2FeatureExtractor", {"do_normalize": False, "padding_value": 0.25}, 0),
        ("Wav2Vec2FeatureExtractor", {"return_attention_mask": True}, 0),
        ("SpeechT5FeatureExtractor", {"do_normalize": True}, 0),
        ("SeamlessM4TFeatureExtractor", {}, 0),
        ("ASTFeatureExtractor", {"max_length": 128}, 0),
        ("ASTFeatureExtractor", {"max_length": 64, "num_mel_bins": 64, "do_normalize": False}, 0),
        ("WhisperFeatureExtractor", {"chunk_length": 1}, 1e-3),
        ("WhisperFeatureExtractor", {"chunk_length": 2, "feature_size": 128}, 1e-3),
    ],
)
@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")  # of AST's own filters
def test_values_equal_those_of_transformers_extractors(name: str, options: dict[str, Any], bound: float) -> None:
    import transformers

    extractor = getattr(transformers, name)(**options)
    extraction = extraction_of(extractor)
    assert extraction.bound == bound
    mask = "attention_mask" if extraction.masked else ""
    step = Audio(
        rate=RATE,
        operations=extraction.operations,
        values=extraction.values,
        attention_mask=mask,
        padding=extractor.padding_value,
        least=extraction.least,
    )
    assert Audio.model_validate_json(step.model_dump_json()) == step
    files = [*synthesized(12, least=0.05)]
    for group in [files] if mask else [[file] for file in files]:
        found = run(step, *group)
        samples = [step.samples(content) for content in group]
        expected = extractor(samples, sampling_rate=RATE, return_tensors="np", **({"padding": True} if mask else {}))
        for key in (extraction.values, *([mask] if mask else [])):
            assert found[key].shape == expected[key].shape
            assert np.abs(found[key] - expected[key]).max() <= bound


@pytest.mark.parametrize("scale", ["htk", "kaldi", "slaney"])
@pytest.mark.parametrize(("in_mel", "equal_area"), [(False, False), (True, False), (False, True)])
def test_mel_filters_equal_transformers(scale: Any, in_mel: bool, equal_area: bool) -> None:
    from transformers.audio_utils import mel_filter_bank

    mel = Mel(bands=40, lowest=20, highest=7600, scale=scale, triangles_in_mel=in_mel, equal_area=equal_area)
    norm = "slaney" if equal_area else None
    expected = mel_filter_bank(257, 40, 20, 7600, RATE, norm, scale, triangularize_in_mel_space=in_mel)
    assert np.array_equal(filters(mel, 257, RATE), expected)
    with pytest.raises(InvalidArgument, match=r"from 5\.0 to 5\.0 Hz; they need a width"):
        filters(Mel(bands=4, lowest=5, highest=5, scale=scale), 9, RATE)


def test_extractors_and_fields_that_are_not_known_are_refused() -> None:
    import transformers as untyped

    transformers: Any = untyped
    with pytest.raises(Unsupported, match="the steps of ClapFeatureExtractor are not known; there are those of AST"):
        extraction_of(transformers.ClapFeatureExtractor())
    with pytest.raises(Unsupported, match="adds noise"):
        extraction_of(transformers.WhisperFeatureExtractor(dither=0.1))
    with pytest.raises(Unsupported, match="pads at the left"):
        extraction_of(transformers.Wav2Vec2FeatureExtractor(padding_side="left"))


def test_operations_that_do_not_fit_are_refused() -> None:
    mel = Mel(bands=8, highest=8000, scale="htk")
    with pytest.raises(ValidationError, match="transform of 256 samples is shorter than a frame of 400"):
        Spectrogram(frame=400, hop=160, fft=256, mel=mel, log="log")
    with pytest.raises(ValidationError, match="transpose must be the last operation"):
        Audio(rate=RATE, operations=(Transpose(), Normalize()))
    short = Audio(rate=RATE, operations=(Spectrogram(frame=400, hop=160, fft=512, mel=mel, log="log", centered=False),))
    with pytest.raises(InvalidArgument, match=r"element 0 of input 'audio' has 399 samples at 16000 Hz; .* needs 400"):
        run(short, file_of(NOISE[:399]))
    assert Stack(count=2).apply(np.ones((3, 4), np.float32), RATE).tolist()[1] == [1, 1, 1, 1, 0, 0, 0, 0]


class TestCtc:
    tokens = ("<pad>", "|", "a", "b", "</s>")

    def text(self, ids: list[int], **options: Any) -> str:
        logits = np.eye(len(self.tokens), dtype=np.float32)[ids][None]
        values = {"logits": logits, **options.pop("values", {})}
        found = Ctc(tokens=self.tokens, **options).open(lambda name: b"")(values)["text"]
        return str(found[0].decode())

    def test_repetitions_become_one_and_blanks_none(self) -> None:
        assert self.text([0, 2, 2, 0, 2, 1, 1, 3, 0, 1]) == "aa b"
        assert self.text([0, 0]) == ""

    def test_texts_equal_those_of_the_tokenizer(self, tmp_path: Path) -> None:
        import json

        import transformers

        (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(self.tokens)}))
        kind: Any = transformers.Wav2Vec2CTCTokenizer
        tokenizer = kind(str(tmp_path / "vocab.json"))
        random = np.random.default_rng(0)
        for _ in range(50):
            ids = random.integers(0, len(self.tokens), 30).tolist()
            assert self.text(ids) == tokenizer.decode(ids)

    def test_padding_has_no_text(self) -> None:
        convolutions = ((4, 2, 0), (2, 1, 0))  # 12 samples become 5 frames, and then 4
        options: dict[str, Any] = {"sizes": "sizes", "values": {"sizes": np.array([12])}}
        assert self.text([2, 0, 3, 2, 3, 3, 2], convolutions=convolutions, **options) == "aba"

    def test_what_is_replaced_at_the_end(self) -> None:
        assert self.text([2, 1, 3], replaced=((" b", "B"),)) == "aB"
        assert Ctc(tokens=("A", "-"), blank="-", lower=True).open(lambda name: b"")(
            {"logits": np.array([[[1.0, 0.0]]])}
        )["text"].tolist() == [b"a"]

    def test_rows_with_equal_scores_are_not_certain(self) -> None:
        logits = np.array([[[1.0, 0.0, 0.0]], [[1.0, 0.999, 0.0]]])
        assert Ctc(tokens=("a", "b", "c")).certain({"logits": logits}, 0.01).tolist() == [True, False]


def test_steps_are_declared_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.toml"
    file.write_text(
        'task = "audio-classification"\nlabels = ["bark", "purr"]\nrate = 16000\ntop_k = 1\nlimits = {seconds = 5}\n'
        '[[operations]]\noperation = "normalize"\n'
    )
    steps = read_steps(file).steps
    assert steps.before == (Audio(rate=16_000, operations=(Normalize(),), limits=Limits(seconds=5)),)
    assert [spec.name for spec in steps.outputs] == ["label", "score", "seconds", "cut_seconds"]
    file.write_text(
        'task = "automatic-speech-recognition"\ntokens = ["<pad>", "a"]\nrate = 8000\nattention_mask = "mask"'
    )
    steps = read_steps(file).steps
    assert steps.after == (Ctc(tokens=("<pad>", "a"), sizes="sizes"),)
    assert Steps.model_validate_json(steps.model_dump_json()) == steps
    file.write_text('task = "audio-classification"\nlabels = ["bark"]\nrate = 16000\nrates = 8')
    with pytest.raises(InvalidArgument, match="'rates' is not an option of the task audio-classification"):
        read_steps(file)
    file.write_text('task = "audio-classification"\nlabels = ["bark"]')
    with pytest.raises(InvalidArgument, match=r"does not describe the task audio-classification: .*'rate'"):
        read_steps(file)


def test_steps_of_python() -> None:
    steps = audio_classification(["x", "y"], rate=RATE, values="sound", logits="scores").steps
    assert steps.before[0].writes == ("sound", "seconds", "cut_seconds")
    assert steps.after[0].reads == ("scores",)
    with pytest.raises(InvalidArgument, match="'top_k' is not an option of the task automatic-speech-recognition"):
        speech_recognition(["a"], rate=RATE, top_k=3)


def test_the_guide_names_each_extractor() -> None:
    from ingot.steps.sounds import extractors

    guide = (ROOT / "docs" / "guides" / "serve" / "sounds.md").read_text()
    assert [name for name in extractors._CLASSES if f"`{name}`" not in guide] == []
