"""The commands, their files and one-line descriptions, without importing any of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """One subcommand. `ikcli.commands` has a file of its name, which is imported only when the command runs."""

    name: str
    summary: str
    aliases: tuple[str, ...] = ()
    runs_model: bool = False


GROUPS: tuple[tuple[str, tuple[CommandInfo, ...]], ...] = (
    ("Run a model", (
        CommandInfo("chat", "talk to a model, or continue a text", ("cli",), runs_model=True),
        CommandInfo("serve", "HTTP server for OpenAI, Anthropic and Ollama clients", ("server",), runs_model=True),
        CommandInfo("pull", "download a model from a hub or a URL"),
        CommandInfo("list", "list downloaded models"),
        CommandInfo("rm", "remove downloaded models"),
        CommandInfo("embed", "embed texts, or score them with a reranker", runs_model=True),
        CommandInfo("tokenize", "turn text into tokens with the vocabulary of a model"),
    )),
    ("Check what fits and what limits it", (
        CommandInfo("plan", "show placement and memory of a run before it reads weights", runs_model=True),
        CommandInfo("doctor", "measure this machine, find what limits a model, suggest flags"),
        CommandInfo("devices", "list devices and their free memory"),
        CommandInfo("warmup", "compile the kernels of a model ahead of time", runs_model=True),
    )),
    ("Measure speed and quality", (
        CommandInfo("bench", "speed of given prompt and generation lengths", runs_model=True),
        CommandInfo("sweep-bench", "speed at growing context depth", runs_model=True),
        CommandInfo("sweep-bench-plot", "plot and compare runs of sweep-bench"),
        CommandInfo("batched-bench", "speed of several sequences at once", runs_model=True),
        CommandInfo("perplexity", "perplexity, KL divergence and multiple-choice tasks", runs_model=True),
        CommandInfo("report", "one page of plots and tables from results and logs"),
    )),
    ("Convert and quantize", (
        CommandInfo("convert", "convert a checkpoint directory to a model file"),
        CommandInfo("quantize", "quantize a model to smaller types"),
        CommandInfo("imatrix", "compute an importance matrix of a model from text", runs_model=True),
        CommandInfo("study", "measure what each tensor of a model costs in each type"),
        CommandInfo("quantize-stats", "error of tensor types on the tensors of a model"),
        CommandInfo("publish", "prepare quants of a model for a hub, with a model card"),
    )),
    ("Work on model files", (
        CommandInfo("inspect", "show metadata and tensors of a GGUF file"),
        CommandInfo("repack", "convert a model to interleaved types and back"),
        CommandInfo("gguf-split", "split and merge GGUF files"),
    )),
    ("Help", (
        CommandInfo("help", "read the manual, or show the options of a command"),
        CommandInfo("version", "print the version, and with -v the environment"),
    )),
)  # fmt: skip
"""Commands by task, in the order of `ik --help`: those that newcomers want come first."""

COMMANDS = tuple(info for _, members in GROUPS for info in members)

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
    ("vision", "Images"),
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
