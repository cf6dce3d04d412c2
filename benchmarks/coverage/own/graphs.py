"""Graph networks in the manner of torch_geometric: nodes, edges as two rows of indices, sometimes a graph per node."""

# Calls of modules are untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.coverage.case import Case, below, integers

_WIDTH = 16


def scatter(values: torch.Tensor, index: torch.Tensor, count: int, reduce: str = "sum") -> torch.Tensor:
    """Reduce rows that have one index; rows that nothing goes to are zeros."""
    where = index.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    start = values.new_zeros(count, *values.shape[1:])
    if reduce == "sum":
        return start.scatter_add(0, where, values)
    return start.scatter_reduce(0, where, values, reduce, include_self=False)


def softmax(scores: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Normalise over the edges that go to one node."""
    highest = scatter(scores, index, count, "amax")
    exponents = (scores - highest[index]).exp()
    return exponents / (scatter(exponents, index, count)[index] + 1e-16)


def with_loops(edges: torch.Tensor, count: int) -> torch.Tensor:
    loops = torch.arange(count, device=edges.device)
    return torch.cat([edges, torch.stack([loops, loops])], dim=1)


class Gcn(nn.Module):
    """Two convolutions with symmetric normalisation and self-loops, then the mean over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, _WIDTH), nn.Linear(_WIDTH, 4)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        count = nodes.size(0)
        source, target = with_loops(edges, count)
        degree = scatter(torch.ones_like(target, dtype=nodes.dtype), target, count)
        root = degree.pow(-0.5)
        root = root.masked_fill(root == float("inf"), 0.0)
        weight = (root[source] * root[target]).unsqueeze(-1)
        for layer in self.layers:
            nodes = scatter(layer(nodes)[source] * weight, target, count).relu()
        return nodes.mean(0)


class Gat(nn.Module):
    """Attention over edges by two heads, with leaky scores of both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 2 * _WIDTH, bias=False)
        self.source = nn.Parameter(torch.randn(1, 2, _WIDTH))
        self.target = nn.Parameter(torch.randn(1, 2, _WIDTH))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        count = nodes.size(0)
        source, target = with_loops(edges, count)
        x = self.project(nodes).view(-1, 2, _WIDTH)
        scores = (x * self.source).sum(-1)[source] + (x * self.target).sum(-1)[target]
        weights = softmax(functional.leaky_relu(scores, 0.2), target, count)
        return scatter(x[source] * weights.unsqueeze(-1), target, count).flatten(1)


class Sage(nn.Module):
    """GraphSAGE by the largest of the neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.own = nn.Linear(6, _WIDTH), nn.Linear(6, _WIDTH, bias=False)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        gathered = scatter(nodes[source], target, nodes.shape[0], "amax")
        return functional.normalize(self.near(gathered) + self.own(nodes), dim=-1)


class Gin(nn.Module):
    """An isomorphism network whose edges have features, pooled by graph into sums."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(3, 6)
        self.mlp = nn.Sequential(nn.Linear(6, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 5))
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        nodes: torch.Tensor,
        edges: torch.Tensor,
        weights: torch.Tensor,
        graph: torch.Tensor,
        graphs: torch.Tensor,
    ) -> torch.Tensor:
        messages = (nodes[edges[0]] + self.edge(weights)).relu()
        x = self.mlp((1 + self.eps) * nodes + scatter(messages, edges[1], nodes.shape[0]))
        return graphs + scatter(x, graph, graphs.shape[0])


class EdgeConvolution(nn.Module):
    """Messages of a node and its differences to neighbours, as on point clouds; neighbours by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 8))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist(points, points)  # [B, N, N]
        nearest = distances.topk(4, dim=-1, largest=False).indices
        index = nearest.flatten(1)[..., None].expand(-1, -1, 3)
        near = points.gather(1, index).view(*nearest.shape, 3)
        own = points.unsqueeze(2).expand_as(near)
        return self.mlp(torch.cat([own, near - own], dim=-1)).amax(2)


class RelationalConvolution(nn.Module):
    """A convolution with weights for each kind of edge, of a few bases."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.Parameter(torch.randn(2, 6, _WIDTH))
        self.mix = nn.Parameter(torch.randn(5, 2))
        self.root = nn.Linear(6, _WIDTH)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        weights = torch.einsum("rb,bio->rio", self.mix, self.bases)
        total = self.root(nodes)
        for kind in range(5):
            chosen = (kinds == kind).to(nodes.dtype).unsqueeze(-1)
            messages = (nodes[edges[0]] @ weights[kind]) * chosen
            total = total + scatter(messages, edges[1], nodes.shape[0])
        return total


class Transformer(nn.Module):
    """Dot-product attention of heads over edges, with a gate between it and the node's own features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, _WIDTH) for _ in range(3))
        self.skip, self.gate = nn.Linear(6, _WIDTH), nn.Linear(3 * _WIDTH, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        query, key, value = (part(nodes).unflatten(-1, (4, -1)) for part in (self.query, self.key, self.value))
        scores = (query[target] * key[source]).sum(-1) / key.size(-1) ** 0.5
        weights = softmax(scores, target, nodes.size(0))
        out = scatter(value[source] * weights[..., None], target, nodes.size(0)).flatten(1)
        own = self.skip(nodes)
        gate = self.gate(torch.cat([out, own, out - own], dim=-1)).sigmoid()
        return gate * own + (1 - gate) * out


class TopKPooling(nn.Module):
    """Keeps the better half of the nodes and the edges between them, then reads out the mean and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, _WIDTH)
        self.weight = nn.Parameter(torch.randn(_WIDTH))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.embed(nodes).tanh()
        score = torch.tanh((x @ self.weight) / self.weight.norm())
        kept = score.topk((nodes.shape[0] + 1) // 2).indices
        among = torch.zeros_like(score, dtype=torch.bool).index_fill(0, kept, True)
        edge = (among[edges[0]] & among[edges[1]]).to(x.dtype)
        x = x * (score * among).unsqueeze(-1)
        x = x + scatter(x[edges[0]] * edge[:, None], edges[1], nodes.shape[0])
        x = x[kept]
        return torch.cat([x.mean(0), x.amax(0)])


class AttentionPooling(nn.Module):
    """Reads graphs out twice by an LSTM whose state attends to the nodes of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(6, _WIDTH), nn.LSTMCell(2 * _WIDTH, _WIDTH)

    def forward(self, nodes: torch.Tensor, graph: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        x, count = self.embed(nodes).relu(), graphs.shape[0]
        state = (x.new_zeros(count, _WIDTH), x.new_zeros(count, _WIDTH))
        read = x.new_zeros(count, 2 * _WIDTH)
        for _ in range(2):
            state = self.cell(read, state)
            weights = softmax((x * state[0][graph]).sum(-1), graph, count)
            read = torch.cat([state[0], scatter(x * weights[:, None], graph, count)], dim=-1)
        return read + graphs


_NODES, _EDGES = "nodes:float32[nodes=1..2000,6]", "edges:int64[2,edges=1..8000]"
_GRAPH = {"nodes": (6, 11, 4, 20), "edges": (9, 15, 5, 40)}
_INDEX = {"edges": below("nodes")}

CASES = (
    Case("graph_gcn", "graph", Gcn, (_NODES, _EDGES), _INDEX, sizes=_GRAPH),
    Case("graph_gat", "graph", Gat, (_NODES, _EDGES), _INDEX, sizes=_GRAPH),
    Case("graph_sage", "graph", Sage, (_NODES, _EDGES), _INDEX, sizes=_GRAPH),
    Case(
        "graph_gin",
        "graph",
        Gin,
        (
            _NODES,
            _EDGES,
            "weights:float32[edges=1..8000,3]",
            "graph:int64[nodes=1..2000]",
            "graphs:float32[graphs,5]",
        ),
        {**_INDEX, "graph": below("graphs")},
        sizes={**_GRAPH, "graphs": (3, 2, 4, 7)},
    ),
    Case(
        "graph_edge_convolution",
        "graph",
        EdgeConvolution,
        ("points:float32[batch,points=4..1000,3]",),
        sizes={"points": (8, 12, 5, 20)},
    ),
    Case(
        "graph_relational",
        "graph",
        RelationalConvolution,
        (_NODES, _EDGES, "kinds:int64[edges=1..8000]"),
        {**_INDEX, "kinds": integers(0, 5)},
        sizes=_GRAPH,
    ),
    Case("graph_transformer", "graph", Transformer, (_NODES, _EDGES), _INDEX, sizes=_GRAPH),
    Case(
        "graph_attention_pooling",
        "graph",
        AttentionPooling,
        (_NODES, "graph:int64[nodes=1..2000]", "graphs:float32[graphs,32]"),
        {"graph": below("graphs")},
        sizes={"nodes": (9, 14, 6, 25), "graphs": (3, 2, 4, 7)},
    ),
    Case("graph_topk_pooling", "graph", TopKPooling, (_NODES, _EDGES), _INDEX, sizes=_GRAPH),
)
