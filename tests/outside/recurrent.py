"""A recurrent architecture: llama whose odd layers have a decaying sum with a state instead of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import CpuLowering, Ref
from ikcli.graph import Cache, Graph, Node, Op, RowSpec
from ikcli.graph.core import Array, Run
from ikcli.models import blocks, llama
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, Weights
from ikcli.native.kernel_cache import KernelKey
from outside.params import DecaySumParams

DECAY = 0.75
tensor_shapes = llama.tensor_shapes


@dataclass(frozen=True, slots=True)
class DecaySum(Op):
    """s = DECAY * s + x from token to token of a sequence; the values of s."""

    name = "decay_sum"
    stores = True

    state: Cache
    x: Node

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        x, states = run.value(self.x), run.cached(self.state)
        out: Array = np.empty_like(x)
        for segment in run.state.segments:
            s = states[segment.seq] if segment.pos else np.zeros(self.x.cols, x.dtype)
            for t in range(segment.start, segment.start + segment.n_tokens):
                s = out[t] = run.dtype(DECAY) * s + x[t]
            states[segment.seq] = s
        return out


@RULES.add(DecaySum, "state x")
def lower(low: CpuLowering, node: Node, op: DecaySum) -> None:
    """The CPU's rule."""
    key = KernelKey("outside.kernels", "make_decay_sum")
    params = DecaySumParams(x=low.out(op.x), out=low.out(node), states=Ref(op.state), cols=node.cols)
    low.emit(key, node.rows, params)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        if g.il % 2 == 0:
            return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)
        q = g.mul_mat(layer.attn_q, x, "sum_in")
        return g.mul_mat(layer.attn_output, g.record(DecaySum(g.state("sum", q.cols), q), "sum"), "sum_out")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return dense_ffn(g, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
