"""Command lines as people write them must parse in every command that runs a model, with the right values."""

# ruff: noqa: E501  (the lines are quoted as they are)

from __future__ import annotations

import shlex

import pytest

from ikcli.cli.parser import Parsed, parse
from ikcli.hostinfo import physical_cores
from ikcli.settings import rules

LINES = {
    "serve-1": r"--alias A --model M -rtr --ctx-size 32768 -ctk q8_0 -mla 2 -fa -amb 512 -fmoe --n-gpu-layers 63 --override-tensor exps=CPU --parallel 1 --numa numactl --threads 48 --host 127.0.0.1 --port 8080",
    "serve-2": r"-mla 2 -fa -ctk f16 -ctv f16 --ctx-size 32768 -fmoe -thp -amb 512 -b 1024 -ub 1024 --threads 16 --threads-batch 16 --n-gpu-layers 99 --override-tensor exps=CPU --host 0.0.0.0 --port 7862 --alias A -m M",
    "serve-3": r"--model M -rtr --ctx-size 41000 -ctk q8_0 -mla 3 -fa -amb 512 -fmoe --n-gpu-layers 63 --override-tensor exps=CPU --parallel 1 --threads 56 --host 0.0.0.0 -ser 5,1 --port 8080",
    "serve-4": r'--model M --ctx-size 163840 --temp 0.5 --top-k 0 --top-p 1.0 --min-p 0.1 --repeat-penalty 1.0 -ctk q8_0 -fa -fmoe -mla 3 -amb 512 -b 4096 -ub 4096 -ngl 99 -ot "blk\.(3|4|5)\.ffn_.*=CUDA0" -ot "blk\.(6|7|8)\.ffn_.*=CUDA1" -ot "blk\.(9|10|11)\.ffn_.*=CUDA2" -ot exps=CPU --threads 24 --host 0.0.0.0 --port 8080 --lookup-cache-dynamic F',
    "serve-5": r'--model M --alias A -ot "blk\.(3|4|5|6|7|8|9|10|11)\.ffn_.*=CUDA0" -ot exps=CPU --threads 32 --threads-batch 64 -ub 4096 -b 4096 --ctx-size 163840 --n-gpu-layers 62 --seed 3407 --temp 0.3 --min-p 0.0 --flash-attn --host 0.0.0.0 -mla 3 -fmoe -amb 512 -mg 0 -rtr --port 11434',
    "serve-6": r"--model M --alias A --no-webui --numa numactl --threads 32 --ctx-size 163840 --n-gpu-layers 62 -ub 4096 -b 4096 --seed 3407 --prio 3 --temp 0.3 --min-p 0.0 --log-colors --flash-attn --host 0.0.0.0 --jinja --port 11434",
    "serve-7": r"-m M -c 8192 -ngl 27 -ts 17,20,21,45 --no-warmup -mla 2",
    "serve-8": r'-m M -c 16384 --no-mmap --no-warmup -v -ngl 99 -ot "blk\.(2[5-9]|[3-6][0-9])\..*_exps\.=CPU" -ot "blk\.([1-6])\..*_exps\.=CUDA0" -ot "blk\.([7-9]|1[0])\..*_exps\.=CUDA1"',
    "serve-9": r"-m M -ub 512 -mla 2 --cache-type-k q8_0 --main-gpu 0 --tensor-split 42,25,25,25,25,25,25,25,25,25,25,25,25,25,40 --threads 64 --temp 0.6 --ctx-size 32768 --seed 3407 --n-gpu-layers 62 --host 0.0.0.0 --port 8080",
    "sweep-1": r"--alias A --model M --run-time-repack --no-mmap -ctk f16 -ctv f16 -mla 2 -fa -amb 1024 -fmoe --ctx-size 32768 -ub 512 --n-gpu-layers 200 --override-tensor exps=CPU --parallel 1 --threads 32 --threads-batch 128",
    "sweep-2": r'--alias A --model M --no-mmap -mla 3 -fa -fmoe -amb 512 -b 4096 -ub 2048 -ctk f16 -c 32768 -ngl 63 -op 27,0,29,0 -ot "blk\.(3)\.ffn_.*=CUDA0" -ot exps=CPU --parallel 1 --threads 32 --threads-batch 32 --warmup-batch',
    "sweep-3": r"--model M --no-mmap -mla 3 -fa -fmoe -amb 512 -b 4096 -ub 2048 -ctk f16 -c 32768 -ngl 63 -ot exps=CPU,attn_kv_b=CPU --threads 32 --warmup-batch",
    "sweep-4": r'--model M --alias A --numa numactl --threads 32 --ctx-size 163840 --n-gpu-layers 62 -ot ".ffn_.*_exps.=CPU" --seed 3407 --temp 0.3 --min-p 0.0 --flash-attn --host 0.0.0.0 -mla 3 -fmoe -rtr --port 11434',
    "sweep-5": r'-m M -c 10240 -t 6 -ngl 100 -ot "blk\.[0-9]\.ffn=CUDA0,ffn=CPU" -ctk q8_0 -ctv q8_0 -fa',
    "chat-1": r'-m M -p "I believe the meaning of life is" -t 6 -ngl 100 -ot "attn=CPU,blk\.[0-3]\.ffn=CPU" -nkvo -c 10240',
    "chat-2": r"-m M -t 32 -ngl 100 -mla 3 -fa -c 32768 -s 1234 -ot exps=CPU -cnv -ctk q8_0 -ctv q8_0",
    "perplexity-1": r"--model M -rtr --numa numactl -ctk q8_0 -mla 2 -fa -amb 512 -fmoe --ctx-size 512 --ubatch-size 512 -f wiki.test.raw --n-gpu-layers 63 --override-tensor exps=CPU --threads 24",
    "bench-1": r"--model M -mla 3 -fa 1 -t 28 --run-time-repack 1 --numa distribute",
    "bench-2": r"-m M -n 0 -p 512 -t 1 -w 0 -r 2 -fmoe 1 -mla 2 -ngl 99 -ts 38,26,24,24,24,24,24,24,24,25,24,24,24,24,33 -o md -v",
    "bench-3": r"-m M -tgb 4,16 -p 512 -n 128 -gp 8192,64 -pg 10000,240",
}  # fmt: skip

EXPECTED: dict[str, dict[str, object]] = {
    "serve-1": {"run_time_repack": True, "n_ctx": 32768, "type_k": "q8_0", "mla": 2, "amb": 512, "n_gpu_layers": 63,
                "override_tensor": ("exps=CPU",), "numa": "numactl", "n_threads": 48, "n_threads_batch": 48},
    "serve-2": {"thp": True, "n_batch": 1024, "n_ubatch": 1024, "n_threads": 16, "n_threads_batch": 16, "mla": 2},
    "serve-3": {"n_ctx": 41000, "ser": (5, 1.0), "fmoe": True, "flash_attn": True},
    "serve-4": {"n_ctx": 163840, "override_tensor": (r"blk\.(3|4|5)\.ffn_.*=CUDA0", r"blk\.(6|7|8)\.ffn_.*=CUDA1",
                r"blk\.(9|10|11)\.ffn_.*=CUDA2", "exps=CPU"), "n_batch": 4096, "n_ubatch": 4096},
    "serve-5": {"seed": 3407, "main_gpu": 0, "n_threads_batch": 64, "flash_attn": True, "mla": 3},
    "serve-6": {"numa": "numactl", "n_gpu_layers": 62, "n_ubatch": 4096, "flash_attn": True},
    "serve-7": {"tensor_split": (17.0, 20.0, 21.0, 45.0), "warmup": False, "n_gpu_layers": 27},
    "serve-8": {"mmap": False, "verbose": True, "override_tensor": (r"blk\.(2[5-9]|[3-6][0-9])\..*_exps\.=CPU",
                r"blk\.([1-6])\..*_exps\.=CUDA0", r"blk\.([7-9]|1[0])\..*_exps\.=CUDA1")},
    "serve-9": {"tensor_split": (42.0, *[25.0] * 13, 40.0), "type_k": "q8_0", "n_ubatch": 512},
    "sweep-1": {"mmap": False, "run_time_repack": True, "n_gpu_layers": 200, "n_threads_batch": 128, "amb": 1024},
    "sweep-2": {"offload_policy": (("MUL_MAT_ID", False), ("MOE_FUSED_UP_GATE", False)), "n_ubatch": 2048},
    "sweep-3": {"override_tensor": ("exps=CPU", "attn_kv_b=CPU")},
    "sweep-4": {"override_tensor": (".ffn_.*_exps.=CPU",), "run_time_repack": True, "flash_attn": True},
    "sweep-5": {"override_tensor": (r"blk\.[0-9]\.ffn=CUDA0", "ffn=CPU"), "type_v": "q8_0", "n_threads": 6},
    "chat-1": {"no_kv_offload": True, "n_ctx": 10240, "override_tensor": ("attn=CPU", r"blk\.[0-3]\.ffn=CPU")},
    "chat-2": {"seed": 1234, "mla": 3, "type_k": "q8_0", "type_v": "q8_0"},
    "perplexity-1": {"n_ctx": 512, "n_ubatch": 512, "mla": 2, "numa": "numactl"},
    "bench-1": {"flash_attn": True, "run_time_repack": True, "numa": "distribute", "n_threads": 28},
    "bench-2": {"fmoe": True, "verbose": True, "tensor_split": (38.0, 26.0, *[24.0] * 7, 25.0, *[24.0] * 4, 33.0)},
    "bench-3": {},
}  # fmt: skip

COMMANDS = ("serve", "chat", "sweep-bench", "bench", "perplexity", "imatrix", "plan", "warmup")


def read(command: str, line: str) -> Parsed:
    return parse(command, shlex.split(line))


# `-p TEXT` is a list of prompt lengths in bench, there a text is an error.
PAIRS = [(name, command) for name in LINES for command in COMMANDS if (name, command) != ("chat-1", "bench")]


@pytest.mark.parametrize(("name", "command"), PAIRS)
def test_line_parses_in_every_command(name: str, command: str) -> None:
    config = read(command, LINES[name]).config
    assert config.model is None if "M" not in LINES[name].split() else str(config.model) == "M"
    for key, value in EXPECTED[name].items():
        assert getattr(config, key) == value, key


def test_ignored_options_are_listed_once_in_order() -> None:
    parsed = read("sweep-bench", LINES["serve-1"] + " --alias B")
    assert parsed.ignored == ("--alias", "--parallel", "--host", "--port")
    parsed = read("perplexity", LINES["serve-4"])
    assert parsed.ignored == (
        "--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--host", "--port", "--lookup-cache-dynamic",
    )  # fmt: skip
    parsed = read("serve", LINES["sweep-2"])
    assert parsed.ignored == ("--warmup-batch",)
    assert read("serve", LINES["serve-6"]).unsupported == ("--prio", "--log-colors")


def test_server_values() -> None:
    config = read("serve", LINES["serve-4"]).config
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.min_p) == (0.5, 0, 0.1)
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8080)
    assert str(config.sampling.lookup_cache_dynamic) == "F"
    assert read("serve", LINES["serve-6"]).config.server.jinja is True
    assert read("sweep-bench", LINES["sweep-2"]).config.sweep.warmup_batch is True
    chat = read("chat", LINES["chat-1"]).config
    assert chat.prompt.prompt == "I believe the meaning of life is"
    assert str(read("perplexity", LINES["perplexity-1"]).config.prompt.file) == "wiki.test.raw"


def test_bench_values_and_alternatives() -> None:
    parsed = read("bench", LINES["bench-2"])
    bench = parsed.config.bench
    assert (bench.n_prompt, bench.n_gen, bench.warmup, bench.repetitions) == ((512,), (0,), False, 2)
    assert parsed.alternatives == {}
    bench = read("bench", LINES["bench-3"]).config.bench
    assert (bench.threads_gen_batch, bench.gp, bench.pg) == (((4, 16),), ((8192, 64),), ((10000, 240),))
    parsed = read("bench", "-p 512,1024 -fa 0,1 -mla 0,2 -ctk f16,q8_0 -ts 1/3 -ts 1,1 -t 1,2")
    assert parsed.config.bench.n_prompt == (512, 1024)
    assert parsed.alternatives == {
        "flash_attn": (False, True), "mla": (0, 2), "type_k": ("f16", "q8_0"), "n_threads": (1, 2),
        "tensor_split": ((1.0, 3.0), (1.0, 1.0)),
    }  # fmt: skip


def test_very_long_rule_list() -> None:
    rules = ",".join(f"{layer}.ffn_{part}_exps=CPU" for layer in range(6, 61) for part in ("down", "up", "gate"))
    assert len(read("serve", f'-ot "{rules}"').config.override_tensor) == 165


def test_powershell_and_pasted_text() -> None:
    parsed = parse("sweep-bench", ["-m", "M", "`", "-fa", "`\n", "-mla", "2"])
    assert (parsed.config.flash_attn, parsed.config.mla) == (True, 2)
    assert len(parsed.warnings) == 2
    parsed = parse("sweep-bench", ["-m", "M", "-fa\u2028-mla", "2\u2028-c\u20281024"])
    assert (parsed.config.mla, parsed.config.n_ctx) == (2, 1024)
    assert any("pasted line separator" in text for text in parsed.warnings)
    kept = parse("chat", ["-p", "one\u2028two"]).config.prompt.prompt
    assert kept == "one\u2028two"


def test_threads_default_to_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "remembered", dict)  # what `ik doctor` measured
    config = parse("sweep-bench", []).config
    assert config.n_threads == config.n_threads_batch == physical_cores()
    assert parse("sweep-bench", ["-t", "auto"]).config.n_threads == physical_cores()
    config = parse("sweep-bench", ["-t", "3", "-tb", "auto"]).config
    assert (config.n_threads, config.n_threads_batch) == (3, 3)


def test_fewer_threads_generate_if_they_were_measured_to_read_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "physical_cores", lambda: 16)
    monkeypatch.setattr(rules, "remembered", lambda: {1: 10.0, 8: 60.0, 12: 59.0, 16: 50.0})
    found = {}
    for line in ("", "-t 16", "-tb 4", "--cpu-range 0-3", "--numa distribute", "-t auto"):
        config = parse("sweep-bench", shlex.split(line)).config
        found[line] = (config.n_threads, config.n_threads_batch)
    own = rules.default_threads(frozenset(range(4)))
    assert found == {"": (12, 16), "-t 16": (16, 16), "-tb 4": (12, 4), "--cpu-range 0-3": (own, own),
                     "--numa distribute": (16, 16), "-t auto": (12, 16)}  # fmt: skip
    monkeypatch.setattr(rules, "remembered", lambda: {1: 10.0, 32: 60.0})  # a cgroup has shrunk since
    assert parse("sweep-bench", []).config.n_threads == 16
