"""All rules, one after the other, over small models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.export.lower import onnx as lower_onnx
from ingot.export.program import Captured, quiet
from ingot.export.proof.parity import prove
from ingot.export.rewrite.passes.manager import PassManager, PassRecord
from ingot.export.rewrite.rules.fx import RULES, TRANSLATIONS
from tests.export.programs import Case, capture
from tests.export.rewrite.rules.fx.support import Session, assert_equal, onnx_operators, recapture

with quiet():
    transformers: Any = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = ("input_ids:int64[batch,seq=..32]", "attention_mask:int64[batch,seq=..32]")


def llama(**kwargs: Any) -> Any:
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            **SIZES, vocab_size=99, num_key_value_heads=2, max_position_embeddings=64, use_cache=False, **kwargs
        )
    )


def bert() -> Any:
    config = transformers.BertConfig(**SIZES, vocab_size=99, max_position_embeddings=64, attn_implementation="eager")
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False, attn_implementation="eager"
    )
    return transformers.GPT2Model(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return transformers.T5EncoderModel(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, attn_implementation="eager")
    return transformers.ViTModel(config, add_pooling_layer=False)


EXPECTED: dict[str, tuple[Any, tuple[str, ...], dict[str, int]]] = {
    "llama": (
        lambda: llama(attn_implementation="eager"),
        TEXT,
        {"attention": 2},
    ),
    "llama, fused attention": (llama, TEXT, {}),
    "bert": (bert, TEXT, {"attention": 2}),
    "gpt2": (gpt2, TEXT, {"bias-gelu": 2, "attention": 2}),
    "t5": (t5, TEXT, {"bias-gelu": 2}),
    "vit": (vit, ("pixel_values:float32[batch,3,16,16]",), {"attention": 2}),
}
CLEANING = ("constant-folding", "dead-branches", "common-subexpressions")


def rewritten(case: Case) -> tuple[torch.fx.GraphModule, tuple[PassRecord, ...]]:
    signature = case.program.signature

    def proof(graph: torch.fx.GraphModule) -> float:
        evidence, _ = prove(case.eager, Captured(graph, signature), signature, case.examples, most=2)
        return max(item.error for item in evidence)

    graph: Any = case.program.exported.module()
    return PassManager(RULES, proof).run(graph)


@pytest.mark.matrix
@pytest.mark.parametrize(("make", "inputs", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_all_rules_in_order_find_what_a_model_has_and_keep_it_equal(
    make: Any, inputs: tuple[str, ...], expected: dict[str, int]
) -> None:
    torch.manual_seed(0)
    with quiet():
        module = make()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        case = capture(module, *inputs)
    graph, records = rewritten(case)
    assert not [record for record in records if record.rejected]
    assert all(record.error < 1e-5 for record in records if record.error is not None)
    found = {record.rule: record.matches for record in records if record.matches}
    assert {name: count for name, count in found.items() if name not in CLEANING} == expected
    again = recapture(case, graph)
    assert_equal(case, Captured(again.exported.module(), again.signature), 2e-5)


@pytest.mark.matrix
def test_a_rewritten_llama_lowers_to_onnx() -> None:
    with quiet():
        case = capture(llama(attn_implementation="eager"), *TEXT)
        graph, _ = rewritten(case)
        model = lower_onnx.lower(recapture(case, graph), translations=TRANSLATIONS)
    assert_equal(case, Session(model), 2e-5)
    assert onnx_operators(model)["Softmax"] == 2
