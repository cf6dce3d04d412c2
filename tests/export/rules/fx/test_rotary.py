from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.export.program import quiet
from ingot.export.rewrite.rules.fx.rotary import ROTARY, Rotary
from tests.export.rules.fx.support import lower, onnx_operators, operators, rewrite, trace

SIZE, HEADS = 8, 2
X = f"x:float32[batch,seq,{HEADS * SIZE}]"
POSITIONS = "positions:int64[batch,seq]"


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class Llama(nn.Module):
    """Rotates as LLaMA does in transformers; ``turn`` and ``spread`` may be other functions."""

    def __init__(
        self,
        turn: Callable[[torch.Tensor], torch.Tensor] = rotate_half,
        spread: Callable[[torch.Tensor], torch.Tensor] = lambda angles: torch.cat((angles, angles), dim=-1),
    ):
        super().__init__()
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, SIZE, 2) / SIZE)))
        self.turn, self.spread = turn, spread

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = (self.inv_freq[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = self.spread(frequencies)
        return angles.cos() * 1.0, angles.sin() * 1.0

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        heads = x.view(x.shape[0], x.shape[1], HEADS, SIZE).transpose(1, 2)
        if positions is None:
            positions = torch.arange(x.shape[1])[None]
        cos, sin = (item.to(x.dtype).unsqueeze(1) for item in self.angles(positions))
        keys = heads.flip(1)
        return (heads * cos) + (self.turn(heads) * sin), (keys * cos) + (self.turn(keys) * sin)


class Placed(Llama):
    """Every row has positions of its own."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert positions is not None
        return super().forward(x, positions * torch.arange(x.shape[1]) + positions)


def chunked(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def test_queries_and_keys_are_rotated_by_one_operator_each() -> None:
    graph = rewrite(Rotary(), Llama(), X, matches=2, tolerance=0)
    assert operators(graph)[str(ROTARY)] == 2
    assert "aten.neg.default" not in operators(graph)


def test_halves_may_be_cut_by_chunk_or_split() -> None:
    rewrite(Rotary(), Llama(chunked), X, matches=2, tolerance=0)

    def split(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(x, SIZE // 2, -1)
        return torch.cat((-second, first), -1)

    rewrite(Rotary(), Llama(split), X, matches=2, tolerance=0)


@pytest.mark.parametrize(("module", "given"), [(Llama(), (X,)), (Placed(), (X, POSITIONS))], ids=["shared", "own"])
def test_it_lowers_to_the_kernel_of_onnx_runtime(module: nn.Module, given: tuple[str, ...]) -> None:
    found = onnx_operators(lower(Rotary(), module, *given, matches=2))
    assert found["RotaryEmbedding"] == 2
    assert "Neg" not in found


def test_the_operator_is_taken_apart_where_pytorch_decomposes() -> None:
    x = torch.randn(1, 3, HEADS * SIZE)
    graph = Rotary()(trace(Llama(), x)).graph
    with quiet():
        decomposed = torch.export.export(graph, (x,)).run_decompositions().module()
    assert operators(graph)[str(ROTARY)] == 2
    assert str(ROTARY) not in operators(decomposed)
    assert torch.equal(decomposed(x)[0], Llama()(x)[0])


def test_a_table_of_angles_counts_if_its_halves_are_equal() -> None:
    class Table(Llama):
        def __init__(self, equal: bool):
            super().__init__()
            self.table: torch.Tensor
            half = torch.randn(1, 5, SIZE // 2)
            self.register_buffer("table", torch.cat((half, half if equal else half.neg()), -1))

        def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.table, self.table

    given = X.replace("seq", "5")
    rewrite(Rotary(), Table(equal=True), given, matches=2)
    rewrite(Rotary(), Table(equal=False), given, matches=0)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize(
    "module",
    [
        Llama(interleaved),
        Llama(lambda x: torch.cat((x[..., SIZE // 2 :], -x[..., : SIZE // 2]), -1)),
        Llama(lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1)),
        Llama(lambda x: rotate_half(x.flip(-1))),
        Llama(lambda x: torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -2).reshape(x.shape)),
        Llama(spread=lambda angles: torch.cat((angles, angles + 1), -1)),
        Llama(spread=lambda angles: torch.repeat_interleave(angles, 2, -1)),
    ],
    ids=["interleaved", "turned back", "not halves", "of another", "other dimension", "other halves", "repeated"],
)
def test_other_rotations_stay(module: nn.Module) -> None:
    assert Rotary()(trace(module, torch.randn(2, 4, HEADS * SIZE))).matches == 0


def test_an_input_whose_heads_come_after_its_positions_stays() -> None:
    class Late(Llama):
        def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            heads = x.view(x.shape[0], x.shape[1], HEADS, SIZE)
            cos, sin = (item.unsqueeze(2) for item in self.angles(torch.arange(x.shape[1])[None]))
            return heads * cos + rotate_half(heads) * sin

    rewrite(Rotary(), Late(), X, matches=0)


def test_half_precision_on_the_cpu_matches_and_bfloat16_does_not() -> None:
    x = torch.randn(2, 4, HEADS * SIZE)
    assert Rotary()(trace(Llama(), x.half())).matches == 2
    assert Rotary()(trace(Llama(), x.bfloat16())).matches == 0
