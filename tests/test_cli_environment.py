"""`LLAMA_ARG_*` variables set options that neither a file nor the command line sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ikcli.cli.help import command_help
from ikcli.cli.parser import all_options, parse
from ikcli.cli.table import BY_NAME
from ikcli.errors import UsageError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("MODEL", "a.gguf", "model", Path("a.gguf")),
        ("MODEL_ALIAS", "fast", "server.alias", "fast"),
        ("THREADS", "3", "n_threads", 3),
        ("CTX_SIZE", "4096", "n_ctx", 4096),
        ("N_PARALLEL", "4", "n_parallel", 4),
        ("BATCH", "1024", "n_batch", 1024),
        ("UBATCH", "256", "n_ubatch", 256),
        ("N_GPU_LAYERS", "0", "n_gpu_layers", 0),
        ("THREADS_HTTP", "2", "server.threads_http", 2),
        ("CHAT_TEMPLATE", "chatml", "server.chat_template", "chatml"),
        ("N_PREDICT", "77", "n_predict", 77),
        ("ENDPOINT_METRICS", "1", "server.metrics", True),
        ("ENDPOINT_SLOTS", "false", "server.slots", False),
        ("EMBEDDINGS", "true", "server.embeddings", True),
        ("FLASH_ATTN", "0", "flash_attn", False),
        ("CONT_BATCHING", "0", "server.cont_batching", False),
        ("HOST", "0.0.0.0", "server.host", "0.0.0.0"),
        ("PORT", "9000", "server.port", 9000),
        ("CACHE_TYPE_K", "q8_0", "type_k", "q8_0"),
        ("CACHE_TYPE_V", "Q4_0", "type_v", "q4_0"),
        ("MLOCK", "1", "mlock", True),
        ("K_CACHE_HADAMARD", "1", "k_hadamard", True),
        ("V_CACHE_HADAMARD", "1", "v_hadamard", True),
    ],
)
def test_every_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, path: str, value: Any) -> None:
    def field(config: Any) -> Any:
        for part in path.split("."):
            config = getattr(config, part)
        return config

    assert field(parse("serve", []).config) != value
    monkeypatch.setenv(f"LLAMA_ARG_{name}", text)
    parsed = parse("serve", [])
    assert field(parsed.config) == value and path in parsed.given
    monkeypatch.setenv(f"LLAMA_ARG_{name}", "")  # as if it were not set
    assert field(parse("serve", []).config) != value


def test_command_line_and_files_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    monkeypatch.setenv("LLAMA_ARG_BATCH", "1024")
    file = tmp_path / "options"
    file.write_text("-b 512\n")
    parsed = parse("serve", [f"@{file}", "-c", "8192"])
    assert (parsed.config.n_ctx, parsed.config.n_batch) == (8192, 512)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CTX_SIZE", "many", 'LLAMA_ARG_CTX_SIZE: "many" is not a whole number'),
        ("FLASH_ATTN", "perhaps", 'LLAMA_ARG_FLASH_ATTN: "perhaps" is neither on nor off'),
        ("CACHE_TYPE_K", "q9", 'LLAMA_ARG_CACHE_TYPE_K: "q9" is not one of'),
        ("THREADS", "0", "LLAMA_ARG_THREADS"),
    ],
)
def test_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(f"LLAMA_ARG_{name}", text)
    with pytest.raises(UsageError, match=message):
        parse("serve", [])


def test_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL_VOCODER", "voice.gguf")
    monkeypatch.setenv("LLAMA_ARG_PORT", "9000")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    parsed = parse("perplexity", [])
    assert parsed.unsupported == ("LLAMA_ARG_MODEL_VOCODER",) and parsed.ignored == ()
    assert parsed.config.n_ctx == 64 and parsed.config.server.port == 8080
    bench = parse("bench", [])
    assert bench.unsupported == () and bench.config.n_ctx == 0
    assert parse("inspect", []).unsupported == ()  # it has a few of the options only


def test_help_names_variables() -> None:
    assert "LLAMA_ARG_CTX_SIZE" in command_help(BY_NAME["serve"])
    names = [name for bound in all_options() for name in bound.option.variables]
    assert len(names) == len(set(names)) > 90
