"""Studies: units, measurements on the resident model, journals that continue, types for a size by measured costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import IkError, UsageError
from ikcli.fleet.executor import LocalExecutor, ProcessExecutor
from ikcli.fleet.worker import UnitFunction, input_file, input_model
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.main import main
from ikcli.quant.calibration import MeasuredGroup, from_study
from ikcli.quant.encoding import Encoding
from ikcli.settings.run import default_model, default_text
from ikcli.study.resident import Resident, ResidentOptions, used_tensors
from ikcli.study.study import StudyOptions, StudyPlan, read_study, run_study, table_lines
from ikcli.study.units import StudyUnit, make_units, work_of
from ikcli.study.worker import StudySetup, measure, open_study

T = GGMLType
TYPES = (T.IQ3_K, T.Q6_K)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "text.txt"
    path.write_text(default_text().read_text("utf-8")[20000:28000], "utf-8")
    return path


@pytest.fixture(scope="module")
def options(text: Path) -> StudyOptions:
    resident = ResidentOptions(default_model(), text, chunks=6, n_ctx=128, n_threads=1)
    return StudyOptions(resident, TYPES, include=("attn_output", "^output"), precision=0.0)


# --- units ------------------------------------------------------------------------------------------------------------
def test_units_of_tensors_roles_and_blocks() -> None:
    file = open_gguf(default_model())
    tensors, _ = make_units(file, file.tensors, TYPES)
    titles = list(dict.fromkeys(u.title for u in tensors))
    fused = next(u for u in tensors if u.title == "blk.1.ffn_up_exps")
    assert set(fused.tensors) == {"blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight"}
    assert titles.index("blk.0.attn_output") < titles.index("blk.1.attn_output") < titles.index("output")
    assert not any("norm" in n or "gate_inp" in n for u in tensors for n in u.tensors)
    roles, _ = make_units(file, file.tensors, TYPES, by="role")
    assert {n.split(".")[1] for u in roles if u.title == "attn_output" for n in u.tensors} == {"0", "1", "2"}
    blocks, _ = make_units(file, file.tensors, TYPES, by="block", include=("blk",))
    assert {u.title for u in blocks} == {"blk.0", "blk.1", "blk.2"}
    assert sum(len(u.tensors) for u in tensors) == sum(len(u.tensors) for u in roles)


def test_what_cannot_be_measured_is_told() -> None:
    file = open_gguf(default_model())
    _, left = make_units(file, file.tensors, (T.IQ1_S, T.Q6_K))
    assert left and left[0].type == T.IQ1_S and "importance matrix" in left[-1].reason
    with pytest.raises(UsageError, match="no tensor is left"):
        make_units(file, file.tensors, TYPES, include=("nothing",))
    with pytest.raises(UsageError, match="importance matrix"):
        make_units(file, file.tensors, (T.IQ1_S,), include=("blk.1.attn_output",))


def test_the_work_of_units() -> None:
    file = open_gguf(default_model())
    n = file.tensors["blk.1.attn_output.weight"].n_elements
    units = [
        StudyUnit(x, (f"{x}.weight",), T.IQ3_K)
        for x in ("token_embd", "blk.0.attn_output", "blk.1.attn_output", "output")
    ]
    assert [work_of([u], file).passes for u in units] == pytest.approx([1, 1, 2 / 3, 0])
    both = work_of([units[2], replace(units[2], type=T.IQ4_K)], file)
    assert both.n_weights == 2 * n and both.most_bytes == file.tensors["blk.1.attn_output.weight"].n_bytes


def test_tensors_that_the_model_does_not_use_are_named(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = open_gguf(default_model())
    keys, path = demo.typed_metadata(), tmp_path / "further.gguf"
    keys["deepseek2.block_count"] = replace(keys["deepseek2.block_count"], value=4)
    keys["deepseek2.nextn_predict_layers"] = replace(keys["deepseek2.block_count"], value=1)
    sources = {name: name for name in demo.tensors}
    sources |= {name.replace("blk.2.", "blk.3."): name for name in demo.tensors if name.startswith("blk.2.")}
    specs = [NewTensor(new, demo.tensors[old].shape, demo.tensors[old].type) for new, old in sources.items()]
    with GGUFWriter(path, keys, specs) as writer:
        for new, old in sources.items():
            writer.write_tensor(new, demo.data(old))
    found = used_tensors(ResidentOptions(path, text, n_ctx=128))
    idle = {name for name in sources if name.startswith("blk.3.")}
    assert found.isdisjoint(idle) and {n for n in demo.tensors if n.startswith("blk.2.")} <= found
    journal = tmp_path / "j.jsonl"
    run = ["-m", str(path), "-f", str(text), "-c", "128", "--chunks", "2", "--types", "iq4_k", "--precision", "0.9"]
    assert main(["study", *run, "--tensors", "attn_output", "-o", str(journal)]) == 0
    out, err = capsys.readouterr()
    assert "the model does not use them; left out: blk.3.attn_output.weight" in err and "blk.3" not in out
    target = ["--target-bpw", "8", "--target-rows", "16", "--study", str(journal), "--dry-run"]
    assert main(["quantize", *target, str(path), str(tmp_path / "o.gguf")]) == 0
    assert "the model does not use" in capsys.readouterr().err


# --- measurements -----------------------------------------------------------------------------------------------------
@pytest.mark.slow  # starts processes; test_fleet.py has what they share
def test_processes_and_journals_give_the_same(options: StudyOptions, tmp_path: Path) -> None:
    plain = run_study(options, LocalExecutor())
    assert list(plain.found) == [u.key for u in plain.units] and len(plain.units) == 8
    for title in plain.titles():
        low, high = (plain.get(title, t) for t in TYPES)
        assert low is not None and high is not None and low.kld > high.kld > -1e-5 and low.n_chunks == 6
    journal = tmp_path / "j.jsonl"
    first = run_study(replace(options, journal=journal), ProcessExecutor(2))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # three results, and a line that was cut off
    told: list[StudyPlan] = []
    again = run_study(replace(options, journal=journal), LocalExecutor(), told.append)
    assert told[0].n_known == 3 and first.found == again.found == plain.found
    assert table_lines(read_study(journal))[0] == table_lines(plain)[0]
    with pytest.raises(UsageError, match="of other work: precision"):
        run_study(replace(options, journal=journal, precision=0.5), LocalExecutor())


def test_a_unit_computes_from_its_layer_on(text: Path) -> None:
    resident = Resident(ResidentOptions(default_model(), text, chunks=2, n_ctx=128))
    runner = resident._runner
    shares = []
    for name in ("token_embd", "blk.0.attn_output", "blk.1.attn_output", "blk.2.attn_output", "output"):
        runner.n_ops = [0, 0]
        measure(resident, Encoding(), 0.0, StudyUnit(name, (f"{name}.weight",), T.IQ3_K))
        done, whole = runner.n_ops
        shares.append(done / whole)
    layers = [op.node.il for op in runner._kept[0].program.ops]
    begins = [layers.index(il) / len(layers) for il in range(3)]
    resident.close()
    assert shares[0] == 1 and shares[1] == pytest.approx(1 - begins[0], abs=0.01)
    assert [1 - s for s in shares[2:4]] == pytest.approx(begins[1:], abs=0.01)
    assert shares[4] < 0.1


def test_a_measurement_ends_when_it_is_precise(options: StudyOptions) -> None:
    few = run_study(replace(options, include=("^output",), precision=0.3), LocalExecutor())
    assert all(2 <= m.n_chunks < 6 and m.error <= 0.3 * m.kld for m in few.found.values())


def test_a_trial_is_the_divergence_of_the_file_that_it_stands_for(text: Path, tmp_path: Path) -> None:
    name = "blk.1.ffn_down_exps.weight"
    resident = Resident(ResidentOptions(default_model(), text, chunks=6, n_ctx=128, n_threads=1))
    found = float(np.concatenate(list(resident.trial({name: T.IQ3_K}, Encoding()))).mean())
    resident.close()
    made = tmp_path / "m.gguf"
    rules = ["--custom-q", f"{name}=iq3_k,.*=f16"]
    assert main(["quantize", *rules, str(default_model()), str(made), "Q8_0"]) == 0
    base = tmp_path / "base.kld"
    run = ["-c", "128", "-f", str(text), "--chunks", "6", "--kl-divergence-base", str(base)]
    assert main(["perplexity", "-m", str(default_model()), *run]) == 0
    from ikcli.engine.run.session import Session
    from ikcli.measure.kl_divergence import KlParams
    from ikcli.measure.kl_divergence import run as run_kl
    from ikcli.measure.kld_file import BaseReader
    from ikcli.settings.run import RunConfig

    config = RunConfig(model=made, command="perplexity", n_ctx=128, n_batch=128, warmup=False, n_threads=1)
    with Session.open(config) as session:
        whole = run_kl(session, BaseReader(base), KlParams(n_batch=128)).summary.kld[0]
    assert found == pytest.approx(whole, rel=0.15)  # the file's kernels round activations, too


def test_workers_refuse_other_files(options: StudyOptions, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Other words. " * 400)
    inputs = (input_model(default_model()), replace(input_file(other), path=options.resident.text))
    with pytest.raises(IkError, match="is another file than that of the command"):
        UnitFunction(open_study, StudySetup(options.resident, None, 0.0), inputs)()


# --- types for a size -------------------------------------------------------------------------------------------------
def test_damages_come_from_the_study() -> None:
    table = {n: {T.IQ3_K: 0.01, T.IQ4_K: 0.0025, T.Q6_K: 0.0002} for n in ("a", "b")}
    study = [MeasuredGroup(("a",), ((T.IQ3_K, 0.4), (T.Q6_K, 0.01))), MeasuredGroup(("gone",), ((T.Q6_K, 1.0),))]
    found = from_study(study, table, {"a": 2.0, "b": 1.0})
    assert set(found) == {"a"}
    assert found["a"].of(0.01) == pytest.approx(0.4) and found["a"].of(0.0002) == pytest.approx(0.01)
    assert 0.01 < found["a"].of(0.0025) < 0.4


def test_commands_from_study_to_recipe(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, recipe = tmp_path / "j.jsonl", tmp_path / "r.txt"
    run = ["-f", str(text), "-c", "128", "--chunks", "4", "--by", "role", "--types", "iq3_k,iq6_k", "-o", str(journal)]
    assert main(["study", *run, "--tensors", "ffn_down", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert {r["title"] for r in out["results"]} == {"ffn_down", "ffn_down_exps", "ffn_down_shexp"}
    target = ["--target-bpw", "4", "--target-rows", "16", "--study", str(journal), "--write-recipe", str(recipe)]
    assert main(["quantize", *target, "--dry-run", str(default_model()), str(tmp_path / "o.gguf")]) == 0
    assert "tensors are not in it and are estimated" in capsys.readouterr().err
    plot = tmp_path / "s.svg"
    assert main(["study", "--show", str(journal), "--plot", str(plot)]) == 0
    assert "| ffn_down_exps" in capsys.readouterr().out and plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--types", "q9_9"], "q9_9"),
        (["--chunks", "0"], "--chunks 0"),
        (["--precision", "2"], "--precision 2"),
        (["--tensors", "("], "--tensors"),
        (["-f", "nowhere.txt"], "nowhere.txt"),
        (["--plot", "x.doc"], "x.doc"),
    ],
)
def test_wrong_input_ends_in_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *words]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
