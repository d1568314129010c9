"""Small checkpoints of whole architectures: logits are those that torch computes with the published code.

The weights are drawn by the names of the tensors. Answers are of transformers where it has the architecture, else of
its code on the hub, written out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import drawn, write_checkpoint

from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "convert_answers.json").read_text())


def _models() -> list[Any]:
    """Parameters; models that need kernels of their own are slow."""
    mark = pytest.mark.slow("compiles kernels for a single model")
    return [pytest.param(m, id=m["name"], marks=mark if m.get("slow") else ()) for m in ANSWERS["models"]]


@pytest.mark.parametrize("model", _models())
def test_a_converted_checkpoint_computes_what_torch_computes(tmp_path: Path, model: dict[str, Any]) -> None:
    tensors = {name: drawn(name, shape) for name, shape in model["tensors"].items()}
    found = open_checkpoint(write_checkpoint(tmp_path / "model", model["config"], tensors))
    out = tmp_path / "out.gguf"
    run(plan_convert(found, out, RecipeOptions(0), ToolOptions(n_threads=1)).job)
    config = RunConfig(model=out, n_ctx=256, n_threads=1, warmup=False, type_k="f32", type_v="f32")
    with Session.open(config) as session:
        steps = [ANSWERS["tokens"][i : i + 4] for i in range(0, len(ANSWERS["tokens"]), 4)]
        logits = [np.array(session.decode(Batch.single(s, 4 * i, logits="all"))) for i, s in enumerate(steps)]
    got = np.concatenate(logits)[np.ix_(ANSWERS["rows"], ANSWERS["columns"])]
    np.testing.assert_allclose(got, model["logits"], atol=2e-3)
