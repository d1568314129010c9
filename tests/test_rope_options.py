"""`--rope-*` and `--yarn-*` replace what the model file says about rotations."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import base_metadata, tiny_deepseek2

from ikcli.cli.parser import parse
from ikcli.errors import UsageError
from ikcli.measure.perplexity import open_window_session, params_of, run
from ikcli.measure.text import load_text, tokenize
from ikcli.models import HParams, RopeParams
from ikcli.models.deepseek2 import attention_scale
from ikcli.models.rope import inverse_frequencies, magnitude


def read(line: str, metadata: dict[str, Any]) -> HParams:
    rope = parse("perplexity", line.split()).config.rope
    return HParams.from_gguf(metadata, {}, "file.gguf", rope)


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("--rope-freq-base 500", {"rope.freq_base": 500.0}),
        ("--rope-scale 4", {"rope.scaling.factor": 4.0}),
        ("--rope-freq-scale 0.25", {"rope.scaling.factor": 4.0}),
        ("--rope-scale 4 --rope-freq-scale 0.25", {"rope.scaling.factor": 4.0}),
        ("--rope-scaling linear --rope-scale 2", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
        (
            "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64 --yarn-beta-fast 16 --yarn-beta-slow 2",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
        ("--yarn-attn-factor 1.5", {"rope.scaling.attn_factor": 1.5}),
        ("--rope-freq-base 0 --rope-scale 0 --yarn-orig-ctx 0 --yarn-ext-factor -1 --yarn-beta-slow -1", {}),
    ],
)
def test_option_is_as_if_the_file_said_so(line: str, keys: dict[str, Any]) -> None:
    assert read(line, base_metadata("llama")) == read("", base_metadata("llama", **keys))


def test_option_goes_before_the_file() -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    metadata = base_metadata("llama", **keys)
    file = read("", metadata).rope
    assert read("--rope-scale 8 --yarn-orig-ctx 32", metadata).rope == replace(file, factor=8.0, n_ctx_orig=32)
    assert read("--rope-scaling linear", metadata).rope == replace(file, scaling="linear")
    assert read("--rope-scaling none", metadata).rope == replace(file, scaling="none", factor=1.0)
    # A scaling that the file switches off keeps its factor for an option that switches it on.
    off = base_metadata("llama", **keys | {"rope.scaling.type": "none"})
    assert read("", off).rope.factor == 1.0
    assert read("--rope-scaling yarn", off).rope == file


def test_extension_factor_mixes_original_frequencies() -> None:
    yarn = RopeParams(scaling="yarn", factor=4.0, n_ctx_orig=128)
    whole, none = inverse_frequencies(yarn, 16), inverse_frequencies(replace(yarn, ext_factor=0.0), 16)
    half = inverse_frequencies(replace(yarn, ext_factor=0.5), 16)
    np.testing.assert_allclose(half, (whole + none) / 2, rtol=1e-12)
    assert np.abs(whole - none).max() > 0.1
    np.testing.assert_array_equal(none, inverse_frequencies(replace(yarn, scaling="linear"), 16))
    assert magnitude(replace(yarn, ext_factor=0.0), 1.0) == 1.0
    linear = read("--rope-scaling linear --rope-scale 4 --yarn-ext-factor 0.5", base_metadata("llama")).rope
    np.testing.assert_array_equal(inverse_frequencies(linear, 16), half)
    assert magnitude(linear, 1.0) == pytest.approx(1 + 0.1 * np.log(4))


def test_attention_scale_of_latent_attention_follows() -> None:
    metadata = tiny_deepseek2().metadata | {"deepseek2.rope.scaling.yarn_log_multiplier": 0.1}
    plain = read("--rope-scaling none", metadata)
    scaled = read("--rope-scaling yarn --rope-scale 4 --yarn-attn-factor 1.5", metadata)
    ratio = attention_scale(scaled) / attention_scale(plain)
    assert ratio == pytest.approx((1.5 * (1 + 0.1 * np.log(4))) ** 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rope-scale 4 --rope-freq-scale 0.5", "contradict each other"),
        ("--rope-freq-base 0.5", "--rope-freq-base 0.5 must be larger than 1"),
        ("--yarn-beta-fast 0", "--yarn-beta-fast 0 must be a positive"),
        ("--yarn-beta-slow 0", "--yarn-beta-slow 0 must be a positive"),
        ("--rope-scaling longrope", "is not one of none, linear, yarn"),
        ("--rope-scale -2", "is less than 0"),
        ("--yarn-orig-ctx many", "is not a whole number"),
    ],
)
def test_values_that_make_no_sense(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(line, base_metadata("llama"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 1605.3388),
        ("--rope-freq-base 500", 1395.1942),
        ("--rope-scale 4", 1587.9097),
        ("--rope-freq-scale 0.5", 1518.9788),
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64", 1625.2402),
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64 --yarn-ext-factor 0.5", 2013.4442),
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64 --yarn-ext-factor 0", 1587.9097),
        ("--rope-scaling linear --rope-scale 4 --yarn-orig-ctx 64 --yarn-ext-factor 0.7", 1479.2528),
        (
            "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64 --yarn-attn-factor 1.3 --yarn-beta-fast 16 "
            "--yarn-beta-slow 2",
            1734.4170,
        ),
        ("--rope-scaling none --rope-scale 4", 1605.3388),
    ],
)
def test_perplexity_of_the_reference(shared_dir: Path, line: str, expected: float) -> None:
    """Values of ik_llama.cpp's llama-perplexity (`-c 256 --chunks 2 -no-fa`, CPU) with the same options."""
    folder = shared_dir / "golden"
    fixed = f"-m {folder}/arch/smollm3.gguf -f {folder}/wiki.head.raw -c 256 --chunks 2 -t 2 -no-fa"
    config = parse("perplexity", f"{fixed} {line}".split()).config
    with closing(open_window_session(config, 256, 512)) as session:
        tokens = tokenize(session, load_text(config))
        found = run(session, tokens, params_of(config))
    assert found.ppl == pytest.approx(expected, rel=5e-4)
