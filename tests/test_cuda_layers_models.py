"""Layer kernels in the graphs of whole models: every node's value, and how many launches a layer takes.

Ops that are not layer ops (matrix products, attention, stores) come from the reference: where such an op would run,
its inputs are looked at and its output is put into device memory. So merged launches are seen at work between them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import EmulatedDevice, needs_emulation
from cuda_graphs import LIMITS, GraphRun, bind, download, n_rows
from factories import N_VOCAB, MemoryModel, tiny_deepseek2, tiny_model
from leaves import Leaf, leaf

from ikcli.backends.cuda.activations import activations
from ikcli.backends.cuda.lower import Counts, GpuLowering, GpuProgram, Ref, all_rules, lower
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Graph, HeadSlice, Node, Op, Rows, Weight
from ikcli.graph.ops_attention import Attn, FlashAttn, KvRows, KvStore
from ikcli.graph.ops_experts import MoeRoute, MoeUpGate, MulMatId, route_parts
from ikcli.graph.ops_rows import Embed, MulMat, MulMatHeads, Product
from ikcli.models import GraphConfig

pytestmark = needs_emulation
Array = npt.NDArray[Any]
CONFIG = GraphConfig(type_k=GGMLType.F32, type_v=GGMLType.F32, n_ctx=32)
MOE = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
GROUPED = {
    "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_norm": True,
}  # fmt: skip
OUTSIDE = "outside"
OTHERS = (Embed, MulMat, MulMatHeads, MulMatId, MoeUpGate, KvStore, KvRows, FlashAttn, Attn)
RULES = all_rules()


def outside(low: GpuLowering, node: Node, op: Op) -> None:
    """An op of another file: reads its inputs, writes its output."""
    sources = list(node.nodes())
    if isinstance(op, MulMatHeads) and op.x.width % 32 == 0:
        activations(low, op.x, op.w.ne2, "q8")
    elif isinstance(op, Product) and op.source.cols % 32 == 0:
        activations(low, HeadSlice(op.source, 0, op.source.cols, 0), 1, "q8")
    outputs = [low.out(node)] if node.cols else []
    low.emit(OUTSIDE, 1, 32, 0, *[low.out(x) for x in sources], *outputs)


def lowered(graph: Graph, n: int, n_outputs: int) -> GpuProgram:
    """A graph with outside ops, planned for a few rows more."""
    most = {Rows.TOKENS: n + 2, Rows.OUTPUTS: n_outputs + 1, Rows.KV: n + 2}
    low = GpuLowering(most, n + 2, LIMITS)
    return lower(graph.nodes, [graph.nodes[-1]], low, RULES.replaced(dict.fromkeys((*OTHERS, Leaf), outside)))


class ModelRun:
    """Runs one micro-batch of a model's generation graph."""

    def __init__(
        self, model: MemoryModel, cfg: GraphConfig = CONFIG, n: int = 3, outputs: tuple[int, ...] = (2,)
    ) -> None:
        self.values: dict[Node, Array] = {}
        self.n, self.outputs = n, outputs
        session = ReferenceSession(model, cfg, observe=lambda node, v: self.values.update({node: v.copy()}))
        batch = Batch.single(np.random.default_rng(3).integers(0, N_VOCAB, n))
        session.decode(Batch(batch.tokens, batch.pos, batch.seq, np.isin(np.arange(n), outputs)))
        self.graph = session._graphs[0]
        names = {w.name for node in self.graph.nodes if not isinstance(node.op, OTHERS) for w in node.weights()}
        self.weights = {name: np.ascontiguousarray(session._load(name), np.float32) for name in names}
        self.program = lowered(self.graph, n, len(outputs))

    def check(self) -> Counter[str]:
        """Compare the values of all nodes; returns kernel -> launches."""
        d = EmulatedDevice()
        stream = d.stream()
        counts = bind(d, stream, self.program, self.n, self.outputs, 0, self.weights)
        seen = set()
        for node, first, stop in self.program.node_ops():
            for at in range(first, stop):
                self._run(d, stream, at, counts)
            if self.program.has_output(node):
                self._compare(d, stream, node)
                seen.add(node)
        assert seen == {node for node in self.graph.nodes if node.cols}
        launches = d.launches.copy()
        d.close()
        return launches

    def _run(self, d: EmulatedDevice, stream: Any, at: int, counts: Counts) -> None:
        op = self.program.ops[at]
        if op.kernel != OUTSIDE:
            for launch in self.program.launches(counts, at, at + 1):
                d.launch(stream, launch)
            return
        for x in op.node.inputs:
            if isinstance(x, Node):
                self._compare(d, stream, x)
        value = self.values[op.node]
        if value.size:
            d.upload(stream, self.program.node_address(op.node), np.ascontiguousarray(value, np.float32))

    def _compare(self, d: EmulatedDevice, stream: Any, node: Node) -> None:
        found, wanted = download(d, stream, self.program, node, n_rows(node, self.n, self.outputs)), self.values[node]
        d.synchronize()
        if isinstance(node.op, MoeRoute):
            n_used = node.op.n_used
            found, wanted = found.copy(), wanted.copy()
            np.testing.assert_array_equal(*(route_parts(x, n_used)[1] for x in (found, wanted)))
            found, wanted = (route_parts(x, n_used)[0] for x in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-6, err_msg=node.name)


MODELS: dict[str, MemoryModel] = {
    "llama": tiny_model("llama"),
    "qwen2": tiny_model("qwen2", optional=("bias",)),
    "qwen3": tiny_model("qwen3"),
    "qwen3-one-kv-head": tiny_model("qwen3", **{"attention.head_count_kv": 1}),
    "qwen3moe": tiny_model("qwen3moe", **MOE),
    "deepseek2": tiny_deepseek2("ik"),
    "deepseek3": tiny_deepseek2("ik", **GROUPED),
    "deepseek2-lite": tiny_deepseek2("ik", **{"attention.q_lora_rank": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_values_of_every_node(name: str) -> None:
    ModelRun(MODELS[name]).check()


@pytest.mark.parametrize("changes", [
    {"mla": 0}, {"mla": 1}, {"mla": 1, "flash_attn": False}, {"mla": 2}, {"k_hadamard": True}, {"fmoe": False},
    {"mla": 0, "k_hadamard": True, "v_hadamard": True}, {"ser": (1, 0.9)},
], ids=str)  # fmt: skip
def test_values_in_other_modes(changes: dict[str, Any]) -> None:
    ModelRun(MODELS["deepseek2"], replace(CONFIG, **changes)).check()


@pytest.mark.parametrize("outputs", [(), (0, 1, 3)])
def test_values_with_other_outputs(outputs: tuple[int, ...]) -> None:
    """The last layer goes on with the rows whose logits are wanted: none, or some."""
    if outputs:
        ModelRun(MODELS["qwen3moe"], n=4, outputs=outputs).check()
    ModelRun(MODELS["deepseek2"], n=20, outputs=outputs or (19,)).check()


def layer_launches(run: ModelRun, il: int) -> list[str]:
    """Layer kernels launched for one token by the ops of layer il, in order."""
    one = Counts(1, 1, 1, 1, 1)
    ops = [op for op in run.program.ops if op.node.name.endswith(f"-{il}") and op.kernel != OUTSIDE]
    return [op.kernel for op in ops if op.when is None or op.when(one)]


def test_launches_per_layer() -> None:
    """What docs/gpu.md says. Sums at the end of a layer are done with the norm that begins the next."""
    assert layer_launches(ModelRun(MODELS["llama"]), 0) == [
        "layer_norm_rows", "layer_heads", "layer_to_q8", "layer_norm_rows", "layer_swiglu", "layer_norm_rows",
    ]  # fmt: skip
    assert layer_launches(ModelRun(tiny_model("qwen2")), 0) == [
        "layer_norm_rows", "layer_heads", "layer_add", "layer_to_q8", "layer_norm_rows", "layer_swiglu",
        "layer_norm_rows",
    ]  # fmt: skip
    assert layer_launches(ModelRun(MODELS["qwen3moe"]), 0) == [
        "layer_norm_rows", "layer_heads", "layer_to_q8", "layer_norm_rows", "layer_moe_route_sort", "layer_to_q8",
        "layer_norm_experts",
    ]  # fmt: skip
    # Layer 1 is the first with experts; its own first norm belongs to layer 0.
    assert layer_launches(ModelRun(MODELS["deepseek2-lite"]), 1) == [
        "layer_latent", "layer_to_q8", "layer_to_q8", "layer_norm_rows", "layer_moe_route_sort", "layer_to_q8",
        "layer_swiglu", "layer_norm_experts",
    ]  # fmt: skip


def test_launches_of_a_recurrent_layer() -> None:
    """The gated norm also makes the rows of the product that follows, unless its heads cut blocks of 32 columns."""
    sizes = {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4}
    launches = ["layer_norm_rows", "layer_decay", "layer_short_conv", "layer_l2_groups", "delta_net_64",
                "layer_gated_norm", "layer_norm_rows", "layer_swiglu", "layer_norm_rows"]  # fmt: skip
    for inner, to_q8 in ((128, []), (64, ["layer_to_q8"])):
        model = tiny_model("qwen35", **sizes, **{"ssm.inner_size": inner})
        assert layer_launches(ModelRun(model), 0) == launches[:6] + to_q8 + launches[6:]


def decoded(rows: Array, k: int) -> Array:
    """Values of q8 rows."""
    codes = np.ascontiguousarray(rows[:, :k]).view(np.int8).astype(np.float32)
    scales = np.ascontiguousarray(rows[:, k : k + k // 8]).view(np.float32)
    return (codes.reshape(len(rows), -1, 32) * scales[:, :, None]).reshape(len(rows), k)


def read_rows(run: GraphRun, x: HeadSlice, heads: int, results: list[Node], n: int) -> tuple[list[Array], Array]:
    """Values of nodes, and the q8 rows of x as numbers, (n * heads, width)."""

    def convert(low: GpuLowering) -> list[tuple[Ref, int]]:
        low.begin(results[0])
        made = activations(low, x, heads, "q8")
        return [(made.at, n * made.row_bytes)]

    values = run.run(*results, extra=convert)
    return values, decoded(run.dumped[0].reshape(n * heads, -1), x.width)


def test_activation_rows_of_queries() -> None:
    """The launch that rotates DeepSeek's queries also quantizes their other columns."""
    rng = np.random.default_rng(1)
    run = GraphRun(RULES, {"w": np.ones(512, np.float32)})
    q = run.input("q", rng.standard_normal((3, 16 * 192)).astype(np.float32))
    kv = run.input("kv", rng.standard_normal((3, 576)).astype(np.float32))
    g, table = run.graph, run.graph.rope_table([0.5**i for i in range(32)], 1.0)
    queries = g.rope(q, table, 16, 192, "q_rope", offset=128)
    latent = g.rms_norm(kv, run.weight("w"), 1e-6, "latent", cols=512)
    rotated = g.rope(kv, table, 1, 576, "k_rope", offset=512)
    row = g.concat_heads([HeadSlice(rotated, 512, 64, 0), HeadSlice(latent, 0, 512, 0)], 1, "kvr")
    nodes = [queries, latent, rotated, row]
    values, rows = read_rows(run, HeadSlice(queries, 0, 128, 192), 16, nodes, 3)
    assert [launch.kernel for launch in run.launched] == ["layer_rope_table", "layer_latent"]
    for found, wanted in zip(values, run.reference(nodes, 3, (), 0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    wanted = run.values[q].reshape(48, 192)[:, :128]
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=np.abs(wanted).max() / 254 * 1.001)


@pytest.mark.parametrize("width", [32, 96, 128, 160, 48])
def test_activation_rows_of_gated_norms(width: int) -> None:
    """One launch makes both, unless groups cut blocks of 32 columns."""
    rng = np.random.default_rng(1)
    run = GraphRun(RULES, {"w": 1 + rng.standard_normal(width).astype(np.float32)})
    x, gate = (run.input(name, rng.standard_normal((3, 2 * width)).astype(np.float32)) for name in ("x", "gate"))
    node = run.graph.gated_norm(x, run.weight("w"), gate, 1e-6, "y")
    (values,), rows = read_rows(run, HeadSlice(node, 0, 2 * width, 0), 1, [node], 3)
    np.testing.assert_allclose(values, run.reference([node], 3, (), 0)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows, values, rtol=0, atol=np.abs(values).max() / 254 * 1.001)
    assert [launch.kernel for launch in run.launched][1:] == ([] if width % 32 == 0 else ["layer_to_q8"])


@pytest.mark.parametrize("which", ["sum", "norm"])
def test_activation_rows_of_a_sum_are_not_those_of_its_norm(which: str) -> None:
    """Both are computed by one launch, which can only convert the norm."""
    rng = np.random.default_rng(1)
    run = GraphRun(RULES, {"w": np.full(64, 3, np.float32)})
    x, y = (run.input(name, rng.standard_normal((2, 64)).astype(np.float32)) for name in "xy")
    total = run.graph.add(x, y, "total")
    norm = run.graph.rms_norm(total, run.weight("w"), 1e-6, "norm")
    chosen = total if which == "sum" else norm
    (values,), rows = read_rows(run, HeadSlice(chosen, 0, 64, 0), 1, [chosen], 2)
    np.testing.assert_allclose(rows, values, rtol=0, atol=np.abs(values).max() / 254 * 1.001)
    assert len(run.launched) == (2 if which == "sum" else 1)


def test_sums_that_were_read_are_not_moved() -> None:
    """A sum that something else has read before the norm stays where it is; one that is a bias is no sum of rows."""
    g = Graph()
    w = Weight("w", GGMLType.F32, (32,))
    x = leaf(g, "x", 32)
    total = g.add(x, x, "total")
    g.swiglu(total, total, "reader")
    g.rms_norm(total, w, 1e-6, "norm")
    g.rms_norm(g.add(x, w, "biased"), w, 1e-6, "norm2")
    names = [op.kernel for op in lowered(g, 2, 1).ops if op.kernel != OUTSIDE]
    assert names == ["layer_add", "layer_swiglu", "layer_norm_rows", "layer_add", "layer_norm_rows"]


def test_nothing_moves_out_of_its_turn() -> None:
    """What another device's turn comes after must be computed before it."""
    g = Graph()
    w = Weight("w", GGMLType.F32, (32,))
    x = leaf(g, "x", 32)
    total = g.add(x, x, "total")
    norm = g.rms_norm(total, w, 1e-6, "norm")
    low = GpuLowering({Rows.TOKENS: 2, Rows.OUTPUTS: 2, Rows.KV: 2}, 2, LIMITS)
    for node in (total, norm):
        low.turn_start = len(low.ops)
        low.begin(node)
        RULES.lower(low, node)
    assert [op.kernel for op in low.ops] == ["layer_add", "layer_norm_rows"]
