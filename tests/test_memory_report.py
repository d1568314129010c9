"""Golden arithmetic of sizes, types and caches, and the log lines made from it."""

from __future__ import annotations

import pytest
from deepseek_shapes import LITE, V3, V25, expert_types, rows, shapes

from ikcli.engine.run import log_lines as report
from ikcli.engine.run.log_lines import KVSize, kv_size
from ikcli.engine.run.run_device import cache_bytes
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, Per
from ikcli.quant.formats import format_by_name

MIB = 2**20


def q2_k(name: str) -> str:
    if name == "output.weight":
        return "q6_K"
    if "attn_k_b" in name:
        return "iq4_nl"
    return "q3_K" if "attn_output" in name or "ffn_down" in name else "q2_K"


def iq3_xxs(name: str) -> str:
    if name == "output.weight":
        return "q5_K"
    return "iq3_s" if name == "token_embd.weight" or "attn_output" in name else "iq3_xxs"


FILES = [
    (V3, "ik", expert_types("iq2_k_r4", "iq3_k_r4"), 1147, "226.003 GiB (2.889 BPW)", "224.169 GiB (2.873 BPW",
     {"f32": 361, "q8_0": 612, "iq2_k_r4": 116, "iq3_k_r4": 58}),
    (V3, "ik", expert_types("iq4_ks_r4", "iq5_ks_r4"), 1147, "367.774 GiB (4.701 BPW)", "365.940 GiB (4.690 BPW",
     {"f32": 361, "q8_0": 612, "iq4_ks_r4": 116, "iq5_ks_r4": 58}),
    (V3, "ik", expert_types("iq4_k_r4", "iq5_k_r4"), 1147, "386.183 GiB (4.936 BPW)", "384.349 GiB (4.926 BPW",
     {"f32": 361, "q8_0": 612, "iq4_k_r4": 116, "iq5_k_r4": 58}),
    (V3, "ik", expert_types("q4_k_r4", "q6_k_r4"), 1147, "413.144 GiB (5.281 BPW)", "411.310 GiB (5.272 BPW",
     {"f32": 361, "q8_0": 612, "q4_k_r4": 116, "q6_k_r4": 58}),
    (V3, "ik", q2_k, 1147, "227.689 GiB (2.910 BPW)", "226.697 GiB (2.906 BPW",
     {"f32": 361, "q2_K": 544, "q3_K": 180, "q6_K": 1, "iq4_nl": 61}),
    (V3, "legacy", lambda name: "q8_0", 1025, "664.295 GiB (8.504 BPW)", "662.461 GiB",
     {"f32": 361, "q8_0": 664}),
    (V25, "legacy", iq3_xxs, 959, "84.604 GiB (3.083 BPW)", "84.058 GiB (3.077 BPW",
     {"f32": 300, "q5_K": 1, "iq3_xxs": 597, "iq3_s": 61}),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "layout", "type_of", "count", "size", "repeating", "histogram"), FILES)
def test_model_sizes(dims, layout, type_of, count, size, repeating, histogram) -> None:
    tensors = rows(dims, layout, type_of)
    assert len(tensors) == count
    assert report.type_histogram(tensors) == histogram
    lines = report.model_size_lines(tensors, "label")
    assert lines[0] == "llm_load_print_meta: model ftype      = label"
    assert lines[2] == f"llm_load_print_meta: model size       = {size} "
    assert lines[3].startswith(f"llm_load_print_meta: repeating layers = {repeating}")


@pytest.mark.parametrize(
    ("dims", "counts", "params"),
    [
        (V3, (1025, 1086, 1147), ("671.026 B", "671.026 B", "672.050 B")),
        (V25, (959, 1019, 1079), ("235.741 B", "235.741 B", "236.748 B")),
        (LITE, (377, 404, 431), ("15.706 B", "15.706 B", "15.763 B")),
    ],
)
def test_counts_and_parameters_by_layout(dims, counts, params) -> None:
    for layout, count, text in zip(("legacy", "mainline", "ik"), counts, params, strict=True):
        tensors = rows(dims, layout, lambda name: "f16")
        assert len(tensors) == count
        assert report.count_text(sum(t.n_elements for t in tensors)) == text


def test_repeating_parameters_and_type_line() -> None:
    tensors = rows(V3, "ik", expert_types("iq2_k_r4", "iq3_k_r4"))
    assert report.model_size_lines(tensors)[-1].endswith("224.169 GiB (2.873 BPW, 670.196 B parameters)")
    assert "llama_model_loader: - type iq2_k_r4:  116 tensors" in report.type_lines(tensors)
    assert "llama_model_loader: - type  f32:  361 tensors" in report.type_lines(tensors)


V3_KV = (61, 128, 192, 128, 512, 64)  # layers, heads of K and V, widths of K and V, latent rank, rotated part
V25_KV = (60, 128, 192, 128, 512, 64)
LITE_KV = (27, 16, 192, 128, 512, 64)


def kv_self_size(
    shape: tuple[int, ...], n_ctx: int, mla: int, flash_attn: bool, type_k: str = "f16", type_v: str = "f16"
) -> KVSize:
    """Of the tensors that such a model has."""
    n_layer, n_head, dk, dv, rank, n_rot = shape
    k, v = format_by_name(type_k).type, format_by_name(type_v).type
    caches = []
    for il in range(n_layer):
        if rank and mla:
            caches.append(Cache("kv", il, rank + n_rot, k))
            caches += [Cache("kv_t", il, rank, v, transposed=True)] if mla == 1 and not flash_attn else []
        else:
            caches += [Cache("k", il, n_head * dk, k), Cache("v", il, n_head * dv, v)]
    return kv_size({c: cache_bytes(c, n_ctx) for c in caches})


@pytest.mark.parametrize(
    ("shape", "full", "absorbed", "latent"),
    [
        (V3_KV, (4880, 2592.5, 3507.5), (129.63, 97.46), (68.63, 36.46)),
        (V25_KV, (4800, 2550, 3450), (127.5, 95.86), (67.5, 35.86)),
        (LITE_KV, (270, 143.44, 194.06), (57.38, 43.14), (30.38, 16.14)),
    ],
)
def test_kv_kib_per_token(shape, full, absorbed, latent) -> None:
    pairs = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16"))
    got = [kv_self_size(shape, 1, 0, True, k, v).total / 1024 for k, v in pairs]
    assert got == pytest.approx(full, abs=0.0051)
    got = [kv_self_size(shape, 1, 1, False, k, "f16").total / 1024 for k in ("f16", "q8_0")]
    assert got == pytest.approx(absorbed, abs=0.0051)
    for mla, fa in ((1, True), (2, True), (2, False), (3, True), (3, False)):
        got = [kv_self_size(shape, 1, mla, fa, k, "f16").total / 1024 for k in ("f16", "q8_0")]
        assert got == pytest.approx(latent, abs=0.0051)


@pytest.mark.parametrize(
    ("n_ctx", "f16", "q8_0"),
    [
        (2048, "137.25", "72.91"),
        (8192, "549.00", "291.66"),
        (20480, "1372.50", "729.14"),
        (32768, "2196.00", "1166.62"),
        (41216, "2762.16", "1467.40"),
        (51200, "3431.25", "1822.85"),
        (131072, "8784.00", "4666.50"),
        (153600, "10293.75", "5468.55"),
        (163840, "10980.00", "5833.12"),
    ],
)
def test_kv_self_size_lines(n_ctx, f16, q8_0) -> None:
    for type_k, expected in (("f16", f16), ("q8_0", q8_0)):
        size = kv_self_size(V3_KV, n_ctx, 3, True, type_k)
        line = report.kv_lines(size, n_ctx, type_k, "f16", {})[-1]
        padded = f"{expected:>7}"
        assert line == (
            f"llama_new_context_with_model: KV self size  = {padded} MiB, c^KV ({type_k}): {padded} MiB, "
            f"kv^T: not used, n_ctx = {n_ctx}"
        )


def test_kv_lines_without_flash_attention_and_without_mla() -> None:
    size = kv_self_size(V3_KV, 2048, 1, False, "q8_0", "f16")
    assert "c^KV (q8_0):   72.91 MiB, kv^T (f16):  122.00 MiB" in report.kv_lines(size, 2048, "q8_0", "f16", {})[0]
    gemma = (48, 8, 256, 256, 0, 0)
    size = kv_self_size(gemma, 10240, 3, True)
    lines = report.kv_lines(size, 10240, "f16", "f16", {"CPU": size.total})
    assert lines[0] == "llama_kv_cache_init:        CPU KV buffer size =  3840.00 MiB"
    assert "KV self size  = 3840.00 MiB, K (f16): 1920.00 MiB, V (f16): 1920.00 MiB" in lines[1]
    size = kv_size({Cache("k", 0, 64, GGMLType.F16): 2 * MIB, Cache("s", 1, 64, GGMLType.F32, per=Per.SEQUENCE): MIB})
    assert (
        "K (f16):    2.00 MiB, V (f16):    0.00 MiB, states:    1.00 MiB, "
        in report.kv_lines(size, 1, "f16", "f16", {})[0]
    )
    both = kv_self_size(gemma, 32768, 0, True, "q8_0", "q8_0")
    assert (both.k_bytes, both.v_bytes) == (3264 * MIB, 3264 * MIB)


def test_loader_and_context_lines() -> None:
    assert report.loaded_line(53, 1147, "m.gguf") == (
        "llama_model_loader: loaded meta data with 53 key-value pairs and 1147 tensors from m.gguf "
        "(version GGUF V3 (latest))"
    )
    pairs = report.kv_pair_lines([("general.architecture", "str", "deepseek2"), ("a", "str", "x" * 41)])
    assert pairs[0] == (
        "llama_model_loader: - kv   0:                       general.architecture str              = deepseek2"
    )
    assert pairs[1].endswith(" = " + "x" * 37 + "...")
    assert report.context_lines({"n_ctx": 32768, "ser": report.ser_text(None)}) == [
        "llama_new_context_with_model: n_ctx      = 32768",
        "llama_new_context_with_model: ser        = -1, 0",
    ]
    assert report.ser_text((6, 1.0)) == "6, 1"
    assert report.weight_buffer_lines({"CPU": 212744 * MIB}) == [
        "llm_load_tensors:        CPU buffer size = 212744.00 MiB"
    ]
    assert report.compute_lines({"CUDA_Host": 2 * 129280 * 4}, {"CUDA0": int(3588.01 * MIB)}, 8245, 118) == [
        "llama_new_context_with_model:  CUDA_Host  output buffer size =     0.99 MiB",
        "llama_new_context_with_model:      CUDA0 compute buffer size =  3588.01 MiB",
        "llama_new_context_with_model: graph nodes  = 8245",
        "llama_new_context_with_model: graph splits = 118",
    ]
    (line,) = report.total_lines({"CPU": {"weights": 3 * MIB, "KV": MIB}}, {"CPU": 10 * MIB})
    assert line == "       CPU TOTAL = 4.00 MiB (weights 3.00 + KV 1.00), 10.00 MiB free, margin 6.00 MiB"


def test_buffer_sums_of_expert_placement() -> None:
    tensors = rows(V3, "ik", expert_types("iq2_k_r4", "iq3_k_r4"))
    experts = sum(t.n_bytes for t in tensors if "_exps" in t.name)
    assert experts == 212744 * MIB
    embedding = next(t.n_bytes for t in tensors if t.name == "token_embd.weight")
    assert f"{embedding / MIB:.2f}" == "938.98"
    assert sum(t.n_bytes for t in tensors if "attn_kv_b" in t.name) == 1037 * MIB
    assert len(shapes(V3)) == len(tensors)
