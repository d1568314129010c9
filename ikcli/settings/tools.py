"""Options of the commands that run no model: what `config.py` is for the others. One dataclass per command.

A field made by `arguments()` takes what is no option: files, types, numbers.
"""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.settings.hub import HubConfig
from ikcli.settings.option import arguments, group, opt
from ikcli.settings.quantize import ConvertConfig, QuantizeConfig, QuantizeStatsConfig, StudyConfig
from ikcli.settings.values import parse_size, parse_text_item, parse_threads


@dataclass(frozen=True, slots=True)
class GgufSplitConfig:
    """gguf-split: a model in parts, or parts in one file."""

    args: tuple[str, ...] = arguments("IN OUT")
    split: bool = opt(False, "--split", "switch", help="split IN into OUT-00001-of-0000N.gguf ... (the default)")
    merge: bool = opt(False, "--merge", "switch", help="merge all parts of IN, given its first part, into the file OUT")
    max_tensors: int | None = opt(None, "--split-max-tensors", "int", form="N", example="--split-max-tensors 128",
        minimum=1, help="tensors per part at most, default 128")
    max_size: int = opt(0, "--split-max-size", "custom", form="SIZE", example="--split-max-size 2G",
        parse=parse_size, help="bytes of tensors per part at most (2G or 2GiB is 2^31 bytes, 2GB is 2*10^9)")
    no_tensor_first: bool = opt(False, "--no-tensor-first-split", "switch", help="the first part holds metadata only")
    dry_run: bool = opt(False, "--dry-run", "switch", help="print the parts and write nothing")


@dataclass(frozen=True, slots=True)
class SweepPlotConfig:
    """sweep-bench-plot: runs of sweep-bench in a plot."""

    args: tuple[str, ...] = arguments("FILE...")
    labels: str | None = opt(None, "--labels", "str", form="A,B,...", example="--labels before,after", text=True,
        help="names of the curves, one per file or one per table")
    output: str | None = opt(None, "-o --output", "str", form="NAME", example="-o runs",
        help="prefix of the two files NAME_pp.png and NAME_tg.png (default performance_comparison); a NAME that ends "
        "in .png, .svg or .pdf gets both panels in one figure")


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """report: results of many runs on one page."""

    args: tuple[str, ...] = arguments("[LABEL=]FILE...")
    output: Path = opt(Path("report.html"), "-o --output", "path", form="FILE", example="-o report.html",
        help="the page; it needs no other file")
    title: str = opt("Results", "--title", "str", form="TEXT", example='--title "Genoa, November"', text=True,
        help="heading of the page")
    size: tuple[str, ...] = opt((), "--size", "custom", form="LABEL=SIZE", example="--size IQ4_K=3.8GiB",
        parse=parse_text_item, repeat=True,
        help="size of the model of a label whose log does not tell it (12.5GiB, 900MiB, or a GGUF file) (repeatable)")
    json: bool = opt(False, "--json", "switch", help="print what was read as one JSON object, write no page")


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """publish: quants of a model as a folder for a hub."""

    args: tuple[str, ...] = arguments("[LABEL=]MODEL...")
    out: Path | None = opt(None, "-o --out", "path", form="DIR", example="--out My-Model-GGUF",
        help="the folder to make; it must be new or empty")
    name: str = opt("", "--name", "str", form="NAME", example="--name My-Model-7B", text=True,
        help="name of the model in file names; default general.name")
    base_model: str = opt("", "--base-model", "str", form="USER/REPO", example="--base-model Qwen/Qwen3-8B",
        help="the model that was quantized, for the card; default what the metadata say")
    license: str = opt("", "--license", "str", form="ID", example="--license apache-2.0",
        help="for the card; default general.license")
    split_max_size: int = opt(0, "--split-max-size", "custom", form="SIZE", example="--split-max-size 48GB",
        parse=parse_size,
        help="split larger models into parts of so many bytes at most, in a folder each (2G or 2GiB is 2^31 bytes, 2GB "
        "is 2*10^9)")
    imatrix: Path | None = opt(None, "--imatrix", "path", form="FILE", example="--imatrix imatrix.gguf",
        help="the importance matrix, to be copied into the folder")
    results: tuple[str, ...] = opt((), "--results", "custom", form="[LABEL=]FILE", example="--results Q4_K_M=q4.log",
        parse=parse_text_item, repeat=True,
        help="logs of ik perplexity, with or without --kl-divergence, whose PPL and KLD the card shows; anything ik "
        "report reads. LABEL tells the quant where the log does not (repeatable)")
    note: tuple[str, ...] = opt((), "--note", "custom", form="TEXT",
        example='--note "ik imatrix -m model.gguf -f text.txt"', parse=parse_text_item, repeat=True, text=True,
        help="a text for the card, for example the command of a step (repeatable)")
    source: tuple[str, ...] = opt((), "--source", "custom", form="FILE", example="--source model-BF16.gguf",
        parse=parse_text_item, repeat=True,
        help="a file the quants were made of; the card gets its SHA-256 (repeatable)")
    link: bool = opt(False, "--link", "switch", help="hard links instead of copies of models that need no splitting")
    dry_run: bool = opt(False, "--dry-run", "switch", help="check everything, print files and sizes, write nothing")
    upload: str = opt("", "--upload", "str", form="USER/REPO", example="--upload me/My-Model-GGUF",
        help="send the folder to this repository of the hub, made if it is not there; only what it lacks, so the same "
        "command goes on where it was stopped. Without models: the folder as it is")
    private: bool = opt(False, "--private", "switch", help="with --upload: a new repository is private")
    revision: str = opt("", "--revision", "str", form="BRANCH", example="--revision refs/pr/3",
        help="with --upload: to this branch, made if it is not there, or to the pull request refs/pr/N; default main")
    create_pr: bool = opt(False, "--create-pr", "switch", help="with --upload: as a pull request")
    token: str = opt("", "--token -hft --hf-token", "str", form="TOKEN", example="--token hf_...",
        help="with --upload: access token with the right to write; default HF_TOKEN, or that of hf auth login")
    offline: bool = opt(False, "--offline", "switch", help="ask no server; refuses --upload (also HF_HUB_OFFLINE=1)")
    json: bool = opt(False, "--json", "switch", help="print what was made as JSON")


@dataclass(frozen=True, slots=True)
class InspectConfig:
    """inspect: what is in a GGUF file, how two differ, and changes of metadata."""

    args: tuple[str, ...] = arguments("[FILE [OTHER]]", most=2)
    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model.gguf",
        help="the same as FILE; default the bundled demo model")
    tensors: bool = opt(False, "--tensors", "switch",
        help="list every tensor: of the file, of --match, or all that differ")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    diff: bool = opt(False, "--diff", "switch",
        help="compare FILE with OTHER: metadata, types, tensors that only one has, and numbers, relative to FILE")
    match: tuple[str, ...] = opt((), "--match", "custom", form="RULE[,RULE...]", example="--match exps=CPU",
        parse=parse_text_item, repeat=True,
        help="which tensors a rule takes, how many bytes, and which earlier rule took them: RE=BUF as of -ot, RE=TYPE "
        "as of --custom-q, or an expression alone; @FILE: one rule per line (repeatable)")
    hash: str | None = opt(None, "--hash", "str", form="KIND[,KIND...]", example="--hash sha256",
        help="digests of the data of every tensor and of the model, as gguf-hash prints them: xxh64, sha1, sha256, "
        "uuid, or all (the first three)")
    no_layer: bool = opt(False, "--no-layer", "switch", help="with --hash: only the digests of the whole model")
    check: Path | None = opt(None, "-c --check", "path", form="FILE", example="--check model.sha256",
        help="compute the digests of a file that --hash or gguf-hash printed and compare; exit code 1 if one differs "
        "or none is known")
    sets: tuple[str, ...] = opt((), "--set", "custom", form="KEY=TYPE:VALUE", example="--set general.name=str:mine",
        parse=parse_text_item, repeat=True,
        help="set a metadata key; TYPE str, bool, int, float (these keep the type the key has), u8 to u64, i8 to i64, "
        "f32, f64, or one of them with [] and a JSON list (repeatable)")
    set_files: tuple[str, ...] = opt((), "--set-file", "custom", form="KEY=@FILE",
        example="--set-file tokenizer.chat_template=@chat.jinja", parse=parse_text_item, repeat=True,
        help="set a metadata key to the text of a file (repeatable)")
    deletes: tuple[str, ...] = opt((), "--delete", "custom", form="KEY", example="--delete tokenizer.chat_template",
        parse=parse_text_item, repeat=True, help="delete a metadata key (repeatable)")
    output: Path | None = opt(None, "-o --output", "path", form="FILE", example="-o changed.gguf",
        help="write the changed model here; without it the header of FILE is changed in place if it keeps its size")
    force: bool = opt(False, "--force", "switch",
        help="change keys that say how tensors are read, and replace an existing output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """tokenize: the tokens of a text."""

    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model.gguf",
        help="GGUF model or vocabulary; default the bundled demo model")
    prompt: str | None = opt(None, "-p --prompt", "str", form="TEXT", example='-p "Once upon a time"', text=True,
        help="text to tokenize")
    file: str | None = opt(None, "-f --file", "str", form="FILE", example="-f text.txt", help="read the text here")
    stdin: bool = opt(False, "--stdin", "switch", help="read the text from standard input")
    ids: bool = opt(False, "--ids", "switch", help="print only the ids, as [1, 2, 3]")
    no_bos: bool = opt(False, "--no-bos", "switch", help="never add a BOS token")
    no_escape: bool = opt(False, "--no-escape", "switch", help="accepted; backslashes are never interpreted")
    no_parse_special: bool = opt(False, "--no-parse-special", "switch", help="take the names of control tokens as text")
    log_disable: bool = opt(False, "--log-disable", "switch", help="no warnings on stderr")
    show_count: bool = opt(False, "--show-count", "switch", help="print the number of tokens")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """devices: what a run can use on this machine."""

    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    self_test: bool = opt(False, "--self-test", "switch",
        help="compute the first layers of a model on all devices, compare every op with NumPy and name the one that "
        "is wrong")
    model: Path | None = opt(None, "-m --model", "path", form="FILE", example="-m model.gguf",
        help="model of the self-test; default: the bundled one")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class PullConfig:
    """pull: a model from a hub or a URL into the cache."""

    args: tuple[str, ...] = arguments("USER/REPO[:QUANT] | URL", most=1)
    list: bool = opt(False, "--list", "switch",
        help="show the quants of the repository and whether they would fit this machine, and download none")
    n_ctx: int = opt(8192, "-c --ctx-size", "int", form="N", example="-c 32768", minimum=1,
        help="context of the runs that --list plans")
    checkpoint: bool = opt(False, "--checkpoint", "switch",
        help="the safetensors, config and tokenizer of the repository, for ik convert")
    file: str = opt("", "-hff --hf-file", "str", form="FILE", example="-hff model-Q4_K_M.gguf",
        help="the file of the repository to get; of a split model any part")
    token: str = opt("", "-hft --hf-token", "str", form="TOKEN", example="-hft hf_...",
        help="access token for private and gated repositories; default HF_TOKEN, or that of hf auth login")
    offline: bool = opt(False, "--offline", "switch", env="LLAMA_ARG_OFFLINE",
        help="ask no server: the path of what is there")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")


@dataclass(frozen=True, slots=True)
class ListConfig:
    """list: the models that have been downloaded."""

    json: bool = opt(False, "--json", "switch", help="machine-readable output")


@dataclass(frozen=True, slots=True)
class RemoveConfig:
    """rm: models out of the cache."""

    args: tuple[str, ...] = arguments("NAME...")
    yes: bool = opt(False, "-y --yes", "switch", help="do not ask")


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """doctor: what this machine can do, and what a model can expect of it."""

    model: Path | None = opt(None, "-m --model", "path", form="FILE", example="-m model.gguf",
        help="also tell how fast this model can be at most, what limits it, and which flags help")
    n_ctx: int = opt(0, "-c --ctx-size", "int", form="N", example="-c 32768", minimum=0,
        help="context of the model (default: what it was trained for, as in other commands)")
    n_ubatch: int = opt(512, "-ub --ubatch-size", "int", form="N", example="-ub 2048", minimum=1,
        help="micro-batch of prompts")
    n_threads: int = opt(0, "-t --threads", "custom", form="N", example="-t 8", parse=parse_threads,
        help="threads; auto = physical cores")
    quick: bool = opt(False, "--quick", "switch", help="measure nothing")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class HelpConfig:
    """help: pages of the manual."""

    args: tuple[str, ...] = arguments("[TOPIC | COMMAND]", most=1)


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """version: what is installed."""

    verbose: bool = opt(False, "-v --verbose", "switch", help="environment too")


TOOLS: dict[str, type] = {
    "convert": ConvertConfig,
    "quantize": QuantizeConfig,
    "repack": QuantizeConfig,
    "quantize-stats": QuantizeStatsConfig,
    "study": StudyConfig,
    "gguf-split": GgufSplitConfig,
    "sweep-bench-plot": SweepPlotConfig,
    "inspect": InspectConfig,
    "report": ReportConfig,
    "publish": PublishConfig,
    "tokenize": TokenizeConfig,
    "devices": DevicesConfig,
    "doctor": DoctorConfig,
    "pull": PullConfig,
    "list": ListConfig,
    "rm": RemoveConfig,
    "help": HelpConfig,
    "version": VersionConfig,
}
"""Command -> its options. Commands that are not here run a model and take those of RunConfig."""
