"""Modules written for this run, of the kinds that users write themselves and no model zoo has."""

from __future__ import annotations

from benchmarks.coverage.case import Case, below, integers, lengths_of, padding_mask, uniform
from benchmarks.coverage.own import backbones, diffusion, graphs, sequence, tabular, vision

_PAST = tuple(f"past.{layer}.{part}:float32[batch,4,past=1..64,8]" for layer in range(2) for part in range(2))

SEQUENCES = (
    Case("gru_classifier", "own", sequence.GruClassifier, ("ids:int64[batch,seq]",), {"ids": integers(0, 50)}),
    Case(
        "lstm_translator",
        "own",
        sequence.LstmTranslator,
        ("source:int64[batch,seq]", "target:int64[batch,target]"),
        {"source": integers(0, 60), "target": integers(0, 70)},
    ),
    Case(
        "packed_lstm",
        "own",
        sequence.PackedLstm,
        ("ids:int64[batch,seq]", "lengths:int64[batch]"),
        {"ids": integers(0, 50), "lengths": lengths_of("seq")},
    ),
    Case("crnn", "own", sequence.Crnn, ("image:float32[batch,1,16,width=8..256]",)),
    Case(
        "conformer",
        "own",
        sequence.Conformer,
        ("features:float32[batch,frames,32]", "mask:bool[batch,frames]"),
        {"mask": padding_mask},
    ),
    Case("temporal_convolution", "own", sequence.TemporalConvolution, ("series:float32[batch,seq,4]",)),
    Case(
        "cached_decoder",
        "own",
        sequence.CachedDecoder,
        ("ids:int64[batch,seq=1..64]", *_PAST),
        {"ids": integers(0, 80)},
        sizes={"seq": (3, 1, 2, 5), "past": (4, 9, 6, 1)},
    ),
    Case("complex_rotary", "own", sequence.ComplexRotary, ("x:float32[batch,seq=1..64,32]",)),
    Case("greedy_decoder", "own", sequence.GreedyDecoder, ("prompt:int64[batch,seq]",), {"prompt": integers(0, 40)}),
    Case("linear_attention", "own", sequence.LinearAttention, ("x:float32[batch,seq,24]",)),
    Case("streaming_filter", "own", sequence.Streaming, ("chunk:float32[1,1,samples=8..4000]",), stateful=True),
)

_IMAGE = "image:float32[batch,3,height=32..256,width=32..256]"

IMAGES = (
    Case("unet", "own", vision.UNet, (_IMAGE,)),
    Case(
        "spatial_transformer",
        "own",
        vision.SpatialTransformer,
        ("image:float32[batch,1,height=32..256,width=32..256]",),
    ),
    Case(
        "deformable_attention",
        "own",
        vision.DeformableAttention,
        (
            "query:float32[batch,queries,16]",
            "points:float32[batch,queries,2]",
            "features:float32[batch,16,height=8..64,width=8..64]",
        ),
        {"points": uniform(0, 1)},
        sizes={"queries": (6, 9, 4, 13), "height": (12, 16, 10, 9), "width": (14, 8, 20, 17)},
    ),
    Case("super_resolution", "own", vision.SuperResolution, (_IMAGE,), {"image": uniform(0, 1)}),
    Case(
        "video",
        "own",
        vision.Video,
        ("clip:float32[batch,3,frames=4..32,24,24]",),
        sizes={"frames": (8, 12, 5, 17)},
    ),
    Case(
        "detector",
        "own",
        vision.Detector,
        ("image:float32[batch,3,height=64..256,width=64..256]",),
        sizes={"height": (64, 96, 72, 81), "width": (72, 64, 80, 101)},
    ),
    Case(
        "greedy_suppression",
        "own",
        vision.GreedySuppression,
        ("boxes:float32[boxes=16..500,4]", "scores:float32[boxes=16..500]"),
        {"boxes": vision.random_boxes, "scores": uniform(0, 1)},
        sizes={"boxes": (20, 33, 16, 50)},
    ),
    Case("vae", "own", vision.Vae, ("image:float32[batch,1,32,32]", "noise:float32[batch,4,8,8]")),
    Case(
        "diffusion_step",
        "own",
        vision.DiffusionStep,
        ("latent:float32[batch,4,height=4..64,width=4..64]", "step:int64[batch]"),
        {"step": integers(0, 1000)},
        sizes={"height": (8, 12, 6, 9), "width": (10, 8, 12, 7)},
    ),
)

TABLES = (
    Case(
        "dlrm",
        "own",
        tabular.Dlrm,
        (
            "dense:float32[batch,13]",
            *(f"categories.{index}:int64[batch,{count}]" for index, count in enumerate((4, 2, 1))),
        ),
        {f"categories.{index}": integers(0, size) for index, size in enumerate((100, 50, 20))},
    ),
    Case(
        "two_towers",
        "own",
        tabular.TwoTowers,
        (
            "user.id:int64[batch]",
            "user.history:int64[batch,history=1..50]",
            "user.age:float32[batch]",
            "item.words:int64[items,words=1..50]",
        ),
        {"id": integers(0, 200), "history": integers(0, 300), "age": uniform(18, 90), "words": integers(0, 300)},
        sizes={"history": (4, 7, 1, 9), "items": (3, 5, 1, 8), "words": (6, 2, 9, 11)},
    ),
    Case(
        "graph_convolution",
        "own",
        tabular.GraphConvolution,
        ("nodes:float32[nodes,8]", "edges:int64[2,edges]"),
        {"edges": below("nodes")},
        sizes={"nodes": (6, 11, 4, 20), "edges": (9, 15, 5, 40)},
    ),
    Case(
        "graph_pooling",
        "own",
        tabular.GraphPooling,
        ("nodes:float32[nodes,8]", "graph:int64[nodes]", "graphs:float32[graphs,12]"),
        {"graph": below("graphs")},
        sizes={"nodes": (9, 14, 6, 25), "graphs": (3, 2, 4, 7)},
    ),
    Case("mixture_of_experts", "own", tabular.MixtureOfExperts, ("x:float32[batch,seq,16]",)),
    Case(
        "fourier_operator",
        "own",
        tabular.FourierOperator,
        ("field:float32[batch,points=16..512,2]",),
        sizes={"points": (24, 32, 17, 50)},
    ),
    Case(
        "mel_spectrogram",
        "own",
        tabular.MelSpectrogram,
        ("audio:float32[batch,samples=256..16000]",),
    ),
    Case(
        "fusion",
        "own",
        tabular.Fusion,
        (
            "sample.image.pixels:float32[batch,3,height=8..128,width=8..128]",
            "sample.image.meta:float32[batch,4]",
            "sample.text.ids:int64[batch,seq]",
            "sample.text.mask:bool[batch,seq]",
        ),
        {"ids": integers(0, 60), "mask": padding_mask},
        constants={"scale": 0.5},
    ),
    Case("selection", "own", tabular.Selection, ("rows:float32[rows,6]",), sizes={"rows": (12, 20, 9, 31)}),
    Case("row_loop", "own", tabular.RowLoop, ("batch:float32[rows=1..64,10]",), sizes={"rows": (3, 5, 1, 8)}),
    Case("early_exit", "own", tabular.EarlyExit, ("x:float32[batch,8]",)),
    Case("conditional_exit", "own", tabular.ConditionalExit, ("x:float32[batch,8]",)),
    Case("running_statistics", "own", tabular.RunningStatistics, ("rows:float32[batch,6]",), stateful=True),
)

CASES = (*SEQUENCES, *IMAGES, *TABLES, *graphs.CASES, *backbones.CASES, *diffusion.CASES)
