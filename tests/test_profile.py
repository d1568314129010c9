"""--profile: what is counted for a prompt and for generation, that results stay the same, the printed tables."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ikcli.engine.run import profile as profile_module
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.profile import OpSums, Phase, Profile
from ikcli.engine.run.session import Session
from ikcli.graph import Weight
from ikcli.main import main
from ikcli.quant.formats import row_size
from ikcli.settings.run import RunConfig, default_model

TOKENS = [5, 9, 11, 300, 7, 8, 2]


def opened(**changes) -> Session:
    config = RunConfig(model=default_model(), n_threads=1, n_threads_batch=1, n_ubatch=16, warmup=False, **changes)
    return Session.open(config, n_ctx=256, n_seq_max=2, n_step=2)


@pytest.fixture(scope="module")
def session():
    with opened(profile=True) as s:
        yield s


@pytest.fixture
def profile(session) -> Profile:
    session.clear()
    session.profile.clear()
    return session.profile


@pytest.fixture(scope="module", autouse=True)
def roof():
    """Measure the roofline in no time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_READ_BYTES": 1 << 20, "_READ_S": 0.0, "_PRODUCT_S": 0.0}.items():
            patch.setattr(profile_module, name, value)
        yield


def total(phase: Phase) -> OpSums:
    out = OpSums()
    for group in phase.groups.values():
        out.add(group)
    return out


def test_results_are_those_of_a_run_without(session, profile) -> None:
    with opened() as plain:
        assert plain.profile is None
        for batch in (Batch.single(TOKENS, logits="all"), Batch.single([3], len(TOKENS))):
            assert np.array_equal(session.decode(batch), plain.decode(batch))


def test_phases(session, profile) -> None:
    session.decode(Batch.single(TOKENS))
    session.decode(Batch.single([3], len(TOKENS)))
    session.decode(Batch.single([4, 6], 0, 1))
    both = Batch(np.array([1, 2], np.int32), np.array([8, 2], np.int32), np.array([0, 1], np.int32), np.ones(2, bool))
    session.step(both)
    prompt, generation = profile.phases["prompt"], profile.phases["generation"]
    assert (prompt.n_passes, prompt.n_tokens) == (2, len(TOKENS) + 2)
    assert (generation.n_passes, generation.n_tokens) == (2, 3)
    for phase in (prompt, generation):
        assert 0 < total(phase).seconds <= phase.seconds
    n_ops = len(session.programs["decode"].parts["CPU"].program.ops)
    assert total(prompt).count == 2 * n_ops


def test_bytes_and_operations_of_matrix_products(session, profile) -> None:
    """Dense products read the whole matrix; experts only those that were chosen, every row n_used of them."""
    session.decode(Batch.single(TOKENS))
    groups = profile.phases["prompt"].groups
    hp = session.model.hp
    graph = session.graphs["decode"][0]

    def weights(op: str, name: str) -> list[Weight]:
        nodes = [n for n in graph.nodes if n.op.name == op and n.name.startswith(name)]
        return [w for n in nodes for w in n.inputs if isinstance(w, Weight)]

    (output,) = weights("mul_mat", "result_output")
    found = next(
        g for (place, kernel), g in groups.items() if place.startswith("result_output") and "mul_mat(" in kernel
    )
    assert found.n_bytes == output.ne1 * row_size(output.type, output.ne0)
    assert found.n_ops == 2 * output.ne0 * output.ne1  # the logits of one token
    experts = weights("mul_mat_id", "ffn_moe_down")
    found = next(g for (_, kernel), g in groups.items() if "make_mul_mat_id" in kernel)
    outputs_only = 1 + (len(experts) - 1) * len(TOKENS)  # the last layer computes the wanted token only
    w = experts[0]
    assert found.n_ops == 2 * w.ne0 * w.ne1 * hp.n_expert_used * outputs_only
    one = w.ne1 * row_size(w.type, w.ne0)
    assert found.n_bytes % one == 0
    assert len(experts) * hp.n_expert_used <= found.n_bytes // one <= hp.n_expert_used * outputs_only
    assert all(g.n_ops == 0 for (_, kernel), g in groups.items() if not kernel.startswith("matmul."))


def test_observer_sees_the_same_nodes(session, profile) -> None:
    seen: list[str] = []
    session.observer = lambda node, value: seen.append(node.name)
    try:
        session.decode(Batch.single(TOKENS))
    finally:
        session.observer = None
    plain: list[str] = []
    with opened() as other:
        other.observer = lambda node, value: plain.append(node.name)
        other.decode(Batch.single(TOKENS))
    assert seen == plain and profile.phases["prompt"].n_passes == 1


def test_lines() -> None:
    p = Profile()
    assert p.lines() == []
    p.phases["generation"] = Phase(2, 2, 0.011, {
        ("q (mul_mat)", "matmul.make_mul_mat(q4_0)"): OpSums(4, 0.008, 80_000_000, 320_000_000),
        ("norm", "basic.make_rms_norm()"): OpSums(2, 0.0019995),
        ("tiny", "basic.make_add()"): OpSums(2, 0.0000005),
    })  # fmt: skip
    lines = p.lines()
    assert lines[1] == "profile of generation: 2 tokens in 2 passes, 11.00 ms (op by op, which takes longer)"
    rows = [re.split(r"  +", line) for line in lines[3:]]
    assert rows[0] == [
        "q (mul_mat)",
        "matmul.make_mul_mat(q4_0)",
        "4",
        "8.000",
        "80.0%",
        "2000.0",
        "10.00",
        "40.00",
        "-",
    ]
    assert rows[1][0] == "norm" and rows[1][-3:] == ["-", "-", "-"]
    assert rows[2][0] == "1 others" and rows[3][:3] == ["all", "8", "10.000 100.0%"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_parts_of_the_roofline(monkeypatch) -> None:
    """Reading bounds the one product, multiplying the other; `all` has the sum of the least times."""
    roof = profile_module.Roof(20e9, {"i8": 100e9, "f32": 50e9})
    measured: list[list[Phase]] = []
    monkeypatch.setattr(profile_module, "measure_roofs", lambda phases: measured.append(list(phases)) or {3: roof})
    p = Profile()
    p.phases["prompt"] = Phase(1, 8, 0.02, {
        ("q (mul_mat)", "matmul.make_mul_mat(q4_0)"): OpSums(4, 0.008, 80_000_000, 320_000_000, "i8"),
        ("f (mul_mat)", "matmul.make_mul_mat(f32)"): OpSums(1, 0.010, 80_000_000, 400_000_000, "f32"),
        ("norm", "basic.make_rms_norm()"): OpSums(2, 0.002),
        ("gpu (mul_mat)", "mmvq"): OpSums(1, 0.005, 80_000_000, 1),
    }, n_threads=3)  # fmt: skip
    lines = p.lines()
    assert measured == [[p.phases["prompt"]]]
    assert lines[2] == "roof of 3 threads: 20.0 GB/s read, 50 GOP/s of f32, 100 GOP/s of i8"
    ends = [re.split(r"  +", line)[-1] for line in lines[3:]]
    assert ends == ["of roof", "80% f32", "50% read", "-", "-", "48%"]


def test_the_roofline_is_measured_for_what_was_computed() -> None:
    phases = [
        Phase(groups={("a", "k"): OpSums(kind="i8"), ("b", "k"): OpSums()}, n_threads=2),
        Phase(groups={("a", "k"): OpSums(kind="f32")}, n_threads=2),
        Phase(groups={("a", "k"): OpSums()}, n_threads=5),
    ]
    roofs = profile_module.measure_roofs(phases)
    assert roofs.keys() == {2} and roofs[2].products.keys() == {"i8", "f32"}
    assert min(roofs[2].read, *roofs[2].products.values()) > 0


@pytest.mark.parametrize("command", ["sweep-bench -c 256 -ub 64 -n 2", "batched-bench -npp 8 -ntg 1 -npl 2"])
def test_commands_print_the_tables_on_stderr(command, capsys) -> None:
    assert main([*command.split(), "-t", "1", "--profile"]) == 0
    out, err = capsys.readouterr()
    assert "profile of prompt:" in err and "profile of generation:" in err and "profile" not in out
    assert re.search(r"matmul\.make_mul_mat\(\w+\) .*%", err)
