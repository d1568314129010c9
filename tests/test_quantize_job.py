"""The quantize job: bytes of the result, split files and resuming, interruption, memory, refusals."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quant_models import SHAPES, values, write_model
from tiers import some

from ikcli.errors import IkError, NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant import encoding, quantizer
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.job import JobProgress
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions, ToolPlan, plan_quantize, plan_repack

T = GGMLType
NUMBERS = {name: f.number for f in FILE_TYPES.values() for name in f.names}


def plan(source: Path, out: Path, name: str, recipe: dict[str, Any] | None = None, **options: Any) -> ToolPlan:
    made = RecipeOptions(NUMBERS[name], **(recipe or {}))
    return plan_quantize(str(source), str(out), made, ToolOptions(**{"n_threads": 2, **options}))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# First 16 digits of the SHA-256 of what llama-quantize (commit 8337e4cd3) writes for the model of `quant_models`.
Q8_OUTPUT = {"output_tensor_type": T.Q8_0}
REFERENCE: list[tuple[str, dict[str, Any], str]] = [
    ("Q8_0", {}, "73cc4356e33f6607"),
    ("F16", {}, "cf7a35c122579815"),
    ("BF16", {}, "595a42ea20b35f65"),
    ("F32", {}, "d4e6488951877117"),
    ("Q4_0", Q8_OUTPUT, "2fa7dea8a9bc71bc"),
    ("Q8_0_R8", {}, "eb1336f904f2beda"),
    ("Q4_0_R8", {**Q8_OUTPUT, "attn_v_type": T.Q4_0, "attn_k_type": T.Q4_0}, "d3f03e278d6e6b77"),
]


@pytest.mark.parametrize(("name", "recipe", "expected"), REFERENCE)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_files_are_those_of_the_reference(
    tmp_path: Path, name: str, recipe: dict[str, Any], expected: str, n_threads: int
) -> None:
    source = write_model(tmp_path / "in.gguf")
    job = plan(source, tmp_path / "out.gguf", name, recipe, n_threads=n_threads).job
    assert run(job) == [tmp_path / "out.gguf"]
    assert digest(tmp_path / "out.gguf") == expected


def test_split_results_have_the_tensors_of_the_input_parts(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf", splits=[3, 6, 3])
    run(plan(source, tmp_path / "whole.gguf", "Q8_0").job)
    assert digest(tmp_path / "whole.gguf") == REFERENCE[0][2]
    paths = run(plan(source, tmp_path / "out.gguf", "Q8_0", keep_split=True).job)
    assert [p.name for p in paths] == [f"out-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found, whole = open_gguf(paths[0]), open_gguf(tmp_path / "whole.gguf")
    assert [t.file_index for t in found.tensors.values()] == [0] * 3 + [1] * 6 + [2] * 3
    assert all((found.data(n) == whole.data(n)).all() for n in SHAPES)
    assert found.metadata["split.tensors.count"] == len(SHAPES)


def test_resume_writes_only_what_is_missing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf", splits=[3, 6, 3])
    job = plan(source, tmp_path / "out.gguf", "Q8_0", keep_split=True, partial_requant=True).job
    paths = run(job)
    bytes_of_part = paths[1].read_bytes()
    paths[1].write_bytes(bytes_of_part[:1000])  # cut short: counts as missing
    paths[2].unlink()
    skipped: list[Path] = []
    numbers: list[int] = []
    assert run(job, JobProgress(lambda n, c: numbers.append(n), skipped.append)) == paths[1:]
    assert skipped == paths[:1] and paths[1].read_bytes() == bytes_of_part
    assert numbers == list(range(4, 13))
    other = plan(source, tmp_path / "out.gguf", "F32", keep_split=True, partial_requant=True).job
    with pytest.raises(UsageError, match="holds other tensors or types"):
        run(other)


KILLED = """
import os, signal, sys
from ikcli.quant import encoding
calls = 0
def quantize_rows(*args, **options):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)
original, encoding.quantize_rows = encoding.quantize_rows, quantize_rows
from ikcli.main import main
main(["quantize", sys.argv[1], sys.argv[2], "Q8_0", "1"])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_run_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf")
    out = tmp_path / "o" / "out.gguf"
    done = subprocess.run([sys.executable, "-c", KILLED, source, out], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and len(list(out.parent.iterdir())) == 2  # what is written, and the list of it
    run(plan(source, out, "Q8_0").job)
    assert list(out.parent.iterdir()) == [out] and digest(out) == REFERENCE[0][2]


def test_failure_keeps_an_older_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "in.gguf")
    (tmp_path / "out.gguf").write_bytes(b"older")

    def fail(*args: Any, **options: Any) -> None:
        raise IkError("no luck")

    monkeypatch.setattr(encoding, "quantize_rows", fail)
    with pytest.raises(IkError, match="no luck"):
        run(plan(source, tmp_path / "out.gguf", "Q8_0").job)
    assert (tmp_path / "out.gguf").read_bytes() == b"older" and len(list(tmp_path.iterdir())) == 2


PEAK = """
import resource, sys
from ikcli.main import main
import ikcli.quant.tool, ikcli.commands.quantize
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["quantize", *sys.argv[1:]])
print(code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("name", some(["COPY", "Q8_0"], ["Q8_0"]))
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, name: str) -> None:
    shape = (1024, 1024, 48)  # 192 MiB
    source = tmp_path / "in.gguf"
    with GGUFWriter(source, {"general.architecture": "llama"}, [NewTensor("a_exps.weight", shape, T.F32)]) as writer:
        writer.write_tensor("a_exps.weight", (np.full(1 << 20, 0.5, np.float32) for _ in range(48)))
    arguments = [sys.executable, "-c", PEAK, source, tmp_path / "out.gguf", name, "2"]
    code, mib = subprocess.run(arguments, capture_output=True, timeout=60, check=True).stdout.split()
    assert int(code) == 0 and int(mib) < 120


def test_non_finite_weights_name_tensor_and_row(tmp_path: Path) -> None:
    bad = values("blk.0.ffn_up_exps.weight", SHAPES["blk.0.ffn_up_exps.weight"])
    bad[2, 5, 100] = np.nan
    source = write_model(tmp_path / "in.gguf", **{"blk.0.ffn_up_exps.weight": bad})
    with pytest.raises(NonFiniteError, match=r"tensor blk\.0\.ffn_up_exps\.weight holds NaN or Inf in row 69"):
        run(plan(source, tmp_path / "out.gguf", "Q8_0").job)
    norm = np.ones(256, np.float32)
    norm[7] = np.inf
    source = write_model(tmp_path / "in.gguf", **{"output_norm.weight": norm})
    with pytest.raises(NonFiniteError, match=r"tensor output_norm\.weight holds NaN or Inf at element 7"):
        run(plan(source, tmp_path / "out.gguf", "Q8_0").job)
    assert not (tmp_path / "out.gguf").exists()


def test_values_out_of_range_of_the_type_are_reported(tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    with GGUFWriter(source, {"general.architecture": "llama"}, [NewTensor("a.weight", (32, 4), T.F32)]) as writer:
        writer.write_tensor("a.weight", np.full(128, 1e6, np.float32))
    with pytest.raises(NonFiniteError, match=r"tensor a\.weight, row 0: the values are too large for f16"):
        run(plan(source, tmp_path / "out.gguf", "F16").job)


def test_quantized_input_needs_permission_but_regrouping_does_not(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf")
    q8 = tmp_path / "q8.gguf"
    run(plan(source, q8, "Q8_0").job)
    with pytest.raises(UsageError, match="--allow-requantize"):
        run(plan(q8, tmp_path / "out.gguf", "Q4_0", Q8_OUTPUT).job)
    run(plan(q8, tmp_path / "out.gguf", "Q4_0", Q8_OUTPUT, allow_requantize=True).job)
    found = open_gguf(tmp_path / "out.gguf")
    expected = quantize_rows(dequantize(open_gguf(q8).data("blk.0.attn_q.weight"), T.Q8_0, (256, 64)), T.Q4_0)
    assert (found.data("blk.0.attn_q.weight") == expected).all()
    run(plan(q8, tmp_path / "r8.gguf", "Q8_0_R8").job)
    assert digest(tmp_path / "r8.gguf") == {n: d for n, _, d in REFERENCE}["Q8_0_R8"]


def test_repacking_there_and_back(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf", splits=[3, 9])
    q8 = run(plan(source, tmp_path / "q8.gguf", "Q8_0", keep_split=True).job)
    options = ToolOptions(keep_split=True)
    there = run(plan_repack(str(q8[0]), str(tmp_path / "r8"), (), False, options).job)
    found = open_gguf(there[0])
    assert found.metadata["general.file_type"] == 207
    assert found.tensors["token_embd.weight"].type == T.Q8_0 and found.tensors["output.weight"].type == T.Q8_0_R8
    back = run(plan_repack(str(there[0]), str(tmp_path / "back"), (), True, options).job)
    assert [p.read_bytes() for p in back] == [p.read_bytes() for p in q8]
    some = plan_repack(str(q8[0]), str(tmp_path / "some"), ("_exps",), False, options)
    assert {c.name for c in some.job.choices if c.changes} == {
        f"blk.0.ffn_{kind}_exps.weight" for kind in ("up", "gate", "down")
    }
    assert not any(c.changes for c in plan_repack(str(source), "x", (), False, options).job.choices)  # f16 loses bits


def test_ternary_types_need_ternary_weights_or_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "available_types", lambda: frozenset(T))
    irregular = values("output.weight", (256, 4))
    for weights, message in ((irregular, "is not ternary"), (np.sign(irregular) * np.float32(0.3), "")):
        source = tmp_path / "in.gguf"
        with GGUFWriter(source, {"general.architecture": "llama"}, [NewTensor("a.weight", (256, 4), T.F32)]) as writer:
            writer.write_tensor("a.weight", weights)
        job = plan(source, tmp_path / "out.gguf", "IQ2_BN").job
        if message:
            with pytest.raises(UsageError, match=message):
                quantizer.check(job)
            quantizer.check(plan(source, tmp_path / "out.gguf", "IQ2_BN", force=True).job)
        else:
            quantizer.check(job)


def test_metadata_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "in.gguf")
    entries = {"output.weight": ImatrixEntry(np.ones((1, 256), np.float32), np.ones(1, np.float32))}
    monkeypatch.setattr("ikcli.quant.tool.read_imatrix", lambda path: Imatrix(entries, ("set.txt",), 9, path="x" * 200))
    made = plan(
        source,
        tmp_path / "out.gguf",
        "Q8_0",
        imatrix="i.dat",
        overrides=("llama.context_length=int:99", "my.key=str:a"),
    )
    keys = made.job.metadata
    assert keys["llama.context_length"].value == 99 and keys["my.key"].value == "a"
    assert keys["general.file_type"].value == 7 and keys["general.quantization_version"].value == 2
    assert keys["quantize.imatrix.file"].value == b"x" * 127 and keys["quantize.imatrix.dataset"].value == b"set.txt"
    assert (keys["quantize.imatrix.entries_count"].value, keys["quantize.imatrix.chunks_count"].value) == (1, 9)
    hidden = plan(source, tmp_path / "out.gguf", "Q8_0", imatrix="i.dat", hide_imatrix=True).job.metadata
    assert hidden["quantize.imatrix.file"].value == b"top_secret" == hidden["quantize.imatrix.dataset"].value
    assert hidden["quantize.imatrix.entries_count"].value == 0 == hidden["quantize.imatrix.chunks_count"].value


def test_every_expert_gets_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "in.gguf")
    seen: list[tuple[int, float | None]] = []

    def spy(x: Any, type: GGMLType, row: Any, *, options: EncodeOptions) -> Any:
        seen.append((x.shape[1], None if row is None else float(row[0])))
        return quantize_rows(x, type, row, options=options)

    monkeypatch.setattr(encoding, "quantize_rows", spy)
    n_rows = 2**20
    sums = n_rows * np.repeat(np.arange(4, dtype=np.float32)[:, None], 32, axis=1)
    entries = {"blk.0.ffn_down_exps.weight": ImatrixEntry(sums, np.full(4, n_rows, np.float32))}
    monkeypatch.setattr("ikcli.quant.tool.read_imatrix", lambda path: Imatrix(entries))
    run(plan(source, tmp_path / "out.gguf", "Q8_0", imatrix="i", n_threads=1).job)
    assert [w for ne0, w in seen if ne0 == 32] == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=1e-4)
    assert all(w is None for ne0, w in seen if ne0 != 32)


def test_input_is_never_overwritten(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in.gguf")
    with pytest.raises(UsageError, match="is the input"):
        run(plan(source, source, "Q8_0").job)


def test_rows_are_spread_over_threads_and_checked(rng: np.random.Generator) -> None:
    x = rng.normal(size=(37, 64)).astype(np.float32)
    one = quantize_rows(x, T.Q8_0)
    assert all((quantize_rows(x, T.Q8_0, n_threads=n) == one).all() for n in (2, 5, 40))
    x[33, 3] = np.inf
    with pytest.raises(NonFiniteError, match="row 33"):
        quantize_rows(x, T.Q8_0, n_threads=3)
    with pytest.raises(UsageError, match="groups of 8"):
        quantize_rows(x, T.Q8_0_R8)
    with pytest.raises(UnsupportedError, match="q8_K has no encoder"):
        quantize_rows(np.zeros((1, 256), np.float32), T.Q8_K)
