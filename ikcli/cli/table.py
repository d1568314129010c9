"""Which commands exist, where they live and what they do, without importing any of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """One subcommand. `module` is imported only when the command runs."""

    name: str
    summary: str
    module: str
    aliases: tuple[str, ...] = ()
    runs_model: bool = False


COMMANDS = (
    CommandInfo("perplexity", "perplexity of a model on a text", "ikcli.commands.perplexity", runs_model=True),
    CommandInfo("sweep-bench", "speed at growing context depth", "ikcli.commands.sweep_bench", runs_model=True),
    CommandInfo("sweep-bench-plot", "plot and compare runs of sweep-bench", "ikcli.commands.sweep_bench_plot"),
    CommandInfo(
        "plan", "placement and memory of a run, before it reads weights", "ikcli.commands.plan", runs_model=True
    ),
    CommandInfo("warmup", "compile the kernels a model needs ahead of time", "ikcli.commands.warmup", runs_model=True),
    CommandInfo("tokenize", "text to tokens with the vocabulary of a model", "ikcli.commands.tokenize"),
    CommandInfo("inspect", "metadata and tensors of a GGUF file", "ikcli.commands.inspect"),
    CommandInfo("pull", "download a model from a hub or a URL", "ikcli.commands.pull"),
    CommandInfo("list", "models that have been downloaded", "ikcli.commands.list"),
    CommandInfo("rm", "remove downloaded models", "ikcli.commands.rm"),
    CommandInfo("help", "pages of the manual, or the options of a command", "ikcli.commands.help"),
    CommandInfo("version", "version, and with -v the environment", "ikcli.commands.version"),
    CommandInfo(
        "serve",
        "HTTP server with an OpenAI-compatible API",
        "ikcli.commands.serve",
        aliases=("server",),
        runs_model=True,
    ),
    CommandInfo("chat", "generate text or talk to a model", "ikcli.commands.chat", aliases=("cli",), runs_model=True),
    CommandInfo("bench", "speed of given prompt and generation lengths", "ikcli.commands.bench", runs_model=True),
    CommandInfo("batched-bench", "speed of several sequences at once", "ikcli.commands.batched_bench", runs_model=True),
    CommandInfo("embed", "vectors of texts, or scores of a reranker", "ikcli.commands.embed", runs_model=True),
    CommandInfo("imatrix", "importance matrix of a model on a text", "ikcli.commands.imatrix", runs_model=True),
    CommandInfo("convert", "make a model file of a checkpoint directory", "ikcli.commands.convert"),
    CommandInfo("quantize", "convert a model to smaller types", "ikcli.commands.quantize"),
    CommandInfo("quantize-stats", "error of tensor types on the tensors of a model", "ikcli.commands.quantize_stats"),
    CommandInfo("study", "what each tensor of a model costs in each type", "ikcli.commands.study"),
    CommandInfo("repack", "convert a model to interleaved types", "ikcli.commands.repack"),
    CommandInfo("gguf-split", "split and merge GGUF files", "ikcli.commands.gguf_split"),
    CommandInfo("doctor", "what this machine can do, what limits a model, what to change", "ikcli.commands.doctor"),
    CommandInfo("devices", "devices and their free memory", "ikcli.commands.devices"),
    CommandInfo("publish", "quants of a model as a folder for a hub, with a model card", "ikcli.commands.publish"),
    CommandInfo("report", "one page of plots and tables from results and logs", "ikcli.commands.report"),
)

BY_NAME: dict[str, CommandInfo] = {name: info for info in COMMANDS for name in (info.name, *info.aliases)}

TOPIC_TITLES = (
    ("model", "Model file"),
    ("context", "Context and batches"),
    ("compute", "Computation"),
    ("placement", "GPU and placement"),
    ("prompt", "Prompt and text"),
    ("chat", "Chat"),
    ("sampling", "Sampling"),
    ("server", "Server"),
    ("speculation", "Speculative decoding"),
    ("sweep-bench", "sweep-bench"),
    ("bench", "bench"),
    ("batched-bench", "batched-bench"),
    ("perplexity", "Perplexity"),
    ("imatrix", "imatrix"),
    ("embeddings", "Embeddings"),
    ("fleet", "Several processes and machines"),
    ("general", "General"),
    ("accepted, no effect", "Accepted without effect"),
)
