"""Options of the commands that run no model, one dataclass per command; `run.py` has the options of the others.

A field created by `arguments()` takes the words that are not options: files, types, numbers.
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
    """gguf-split: split a model into parts, or join parts into one file."""

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
    """sweep-bench-plot: plot runs of sweep-bench."""

    args: tuple[str, ...] = arguments("FILE...")
    labels: str | None = opt(None, "--labels", "str", form="A,B,...", example="--labels before,after", text=True,
        help="names of the curves, one per file or one per table")
    output: str | None = opt(None, "-o --output", "str", form="NAME", example="-o runs",
        help="prefix of the two files NAME_pp.png and NAME_tg.png (default performance_comparison); a NAME that ends "
        "in .png, .svg or .pdf gets both panels in one figure")


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """report: show the results of many runs on one page."""

    args: tuple[str, ...] = arguments("[LABEL=]FILE...")
    output: Path = opt(Path("report.html"), "-o --output", "path", form="FILE", example="-o report.html",
        help="the page, a single file")
    title: str = opt("Results", "--title", "str", form="TEXT", example='--title "Genoa, November"', text=True,
        help="heading of the page")
    size: tuple[str, ...] = opt((), "--size", "custom", form="LABEL=SIZE", example="--size IQ4_K=3.8GiB",
        parse=parse_text_item, repeat=True,
        help="model size of a label whose log does not have it (12.5GiB, 900MiB, or a GGUF file) (repeatable)")
    json: bool = opt(False, "--json", "switch", help="print the results as one JSON object and write no page")


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """publish: prepare quants of a model as a folder for a hub."""

    args: tuple[str, ...] = arguments("[LABEL=]MODEL...")
    out: Path | None = opt(None, "-o --out", "path", form="DIR", example="--out My-Model-GGUF",
        help="folder to create; it must be new or empty")
    name: str = opt("", "--name", "str", form="NAME", example="--name My-Model-7B", text=True,
        help="name of the model in file names; default: general.name")
    base_model: str = opt("", "--base-model", "str", form="USER/REPO", example="--base-model Qwen/Qwen3-8B",
        help="the model that was quantized, for the card; default: from the metadata")
    license: str = opt("", "--license", "str", form="ID", example="--license apache-2.0",
        help="for the card; default general.license")
    split_max_size: int = opt(0, "--split-max-size", "custom", form="SIZE", example="--split-max-size 48GB",
        parse=parse_size,
        help="split larger models into parts of so many bytes at most, in a folder each (2G or 2GiB is 2^31 bytes, 2GB "
        "is 2*10^9)")
    imatrix: Path | None = opt(None, "--imatrix", "path", form="FILE", example="--imatrix imatrix.gguf",
        help="importance matrix to copy into the folder")
    results: tuple[str, ...] = opt((), "--results", "custom", form="[LABEL=]FILE", example="--results Q4_K_M=q4.log",
        parse=parse_text_item, repeat=True,
        help="logs of ik perplexity, with or without --kl-divergence, or anything else that ik report reads; the card "
        "shows their PPL and KLD. LABEL names the quant if the log does not (repeatable)")
    note: tuple[str, ...] = opt((), "--note", "custom", form="TEXT",
        example='--note "ik imatrix -m model.gguf -f text.txt"', parse=parse_text_item, repeat=True, text=True,
        help="text for the card, for example the command of a step (repeatable)")
    source: tuple[str, ...] = opt((), "--source", "custom", form="FILE", example="--source model-BF16.gguf",
        parse=parse_text_item, repeat=True,
        help="source file of the quants; the card shows its SHA-256 (repeatable)")
    link: bool = opt(False, "--link", "switch", help="hard-link models without splitting instead of copying")
    dry_run: bool = opt(False, "--dry-run", "switch", help="check everything, print files and sizes, write nothing")
    upload: str = opt("", "--upload", "str", form="USER/REPO", example="--upload me/My-Model-GGUF",
        help="upload the folder to this repository of the hub, which is created if necessary. Only missing files are "
        "sent, so the same command continues an interrupted upload. Without models: upload the folder unchanged")
    private: bool = opt(False, "--private", "switch", help="with --upload: make a new repository private")
    revision: str = opt("", "--revision", "str", form="BRANCH", example="--revision refs/pr/3",
        help="with --upload: the branch, created if necessary, or the pull request refs/pr/N; default main")
    create_pr: bool = opt(False, "--create-pr", "switch", help="with --upload: open a pull request")
    token: str = opt("", "--token -hft --hf-token", "str", form="TOKEN", example="--token hf_...",
        help="with --upload: access token with write permission; default HF_TOKEN, or that of hf auth login")
    offline: bool = opt(False, "--offline", "switch", help="use no network; refuses --upload (also HF_HUB_OFFLINE=1)")
    json: bool = opt(False, "--json", "switch", help="print the result as JSON")


@dataclass(frozen=True, slots=True)
class InspectConfig:
    """inspect: show the contents of a GGUF file, compare two files, and change metadata."""

    args: tuple[str, ...] = arguments("[FILE [OTHER]]", most=2)
    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model.gguf",
        help="same as FILE; default: the bundled demo model")
    tensors: bool = opt(False, "--tensors", "switch",
        help="list every tensor: of the file, of --match, or all that differ")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    diff: bool = opt(False, "--diff", "switch",
        help="compare FILE with OTHER: metadata, types, tensors that only one has, and numbers, relative to FILE")
    match: tuple[str, ...] = opt((), "--match", "custom", form="RULE[,RULE...]", example="--match exps=CPU",
        parse=parse_text_item, repeat=True,
        help="show the tensors that a rule matches, their bytes, and earlier rules that win them: RE=BUF as in -ot, "
        "RE=TYPE as in --custom-q, or an expression alone; @FILE: one rule per line (repeatable)")
    hash: str | None = opt(None, "--hash", "str", form="KIND[,KIND...]", example="--hash sha256",
        help="digests of the data of every tensor and of the model, as gguf-hash prints them: xxh64, sha1, sha256, "
        "uuid, or all (the first three)")
    no_layer: bool = opt(False, "--no-layer", "switch", help="with --hash: only the digests of the whole model")
    check: Path | None = opt(None, "-c --check", "path", form="FILE", example="--check model.sha256",
        help="compute digests and compare them with a file that --hash or gguf-hash printed; exit code 1 if one "
        "differs or none is known")
    sets: tuple[str, ...] = opt((), "--set", "custom", form="KEY=TYPE:VALUE", example="--set general.name=str:mine",
        parse=parse_text_item, repeat=True,
        help="set a metadata key; TYPE str, bool, int, float (these keep the type of the key), u8 to u64, i8 to i64, "
        "f32, f64, or one of them with [] and a JSON list (repeatable)")
    set_files: tuple[str, ...] = opt((), "--set-file", "custom", form="KEY=@FILE",
        example="--set-file tokenizer.chat_template=@chat.jinja", parse=parse_text_item, repeat=True,
        help="set a metadata key to the text of a file (repeatable)")
    deletes: tuple[str, ...] = opt((), "--delete", "custom", form="KEY", example="--delete tokenizer.chat_template",
        parse=parse_text_item, repeat=True, help="delete a metadata key (repeatable)")
    output: Path | None = opt(None, "-o --output", "path", form="FILE", example="-o changed.gguf",
        help="write the changed model here; without it the header of FILE is changed in place if it keeps its size")
    force: bool = opt(False, "--force", "switch",
        help="change keys that determine how tensors are read, and replace an existing output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """tokenize: show the tokens of a text."""

    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model.gguf",
        help="GGUF model or vocabulary; default the bundled demo model")
    prompt: str | None = opt(None, "-p --prompt", "str", form="TEXT", example='-p "Once upon a time"', text=True,
        help="text to tokenize")
    file: str | None = opt(None, "-f --file", "str", form="FILE", example="-f text.txt", help="read the text from FILE")
    stdin: bool = opt(False, "--stdin", "switch", help="read the text from standard input")
    ids: bool = opt(False, "--ids", "switch", help="print only the ids, as [1, 2, 3]")
    no_bos: bool = opt(False, "--no-bos", "switch", help="never add a BOS token")
    no_escape: bool = opt(False, "--no-escape", "switch", help="accepted; backslashes are never interpreted")
    no_parse_special: bool = opt(False, "--no-parse-special", "switch", help="treat control tokens as text")
    log_disable: bool = opt(False, "--log-disable", "switch", help="print no warnings on stderr")
    show_count: bool = opt(False, "--show-count", "switch", help="print the number of tokens")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """devices: list the devices of this machine that a run can use."""

    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    self_test: bool = opt(False, "--self-test", "switch",
        help="compute the first layers of a model on all devices, compare every op with NumPy and name the first wrong "
        "one")
    model: Path | None = opt(None, "-m --model", "path", form="FILE", example="-m model.gguf",
        help="model of the self-test; default: the bundled demo model")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class PullConfig:
    """pull: download a model from a hub or a URL into the cache."""

    args: tuple[str, ...] = arguments("USER/REPO[:QUANT] | URL", most=1)
    list: bool = opt(False, "--list", "switch",
        help="list the quants of the repository and whether they fit this machine; download nothing")
    n_ctx: int = opt(8192, "-c --ctx-size", "int", form="N", example="-c 32768", minimum=1,
        help="context of the runs that --list plans")
    checkpoint: bool = opt(False, "--checkpoint", "switch",
        help="download safetensors, config and tokenizer of the repository, for ik convert")
    file: str = opt("", "-hff --hf-file", "str", form="FILE", example="-hff model-Q4_K_M.gguf",
        help="file of the repository to download; any part of a split model")
    token: str = opt("", "-hft --hf-token", "str", form="TOKEN", example="-hft hf_...",
        help="access token for private and gated repositories; default HF_TOKEN, or that of hf auth login")
    offline: bool = opt(False, "--offline", "switch", env="LLAMA_ARG_OFFLINE",
        help="contact no server; print the path of the downloaded file")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")


@dataclass(frozen=True, slots=True)
class ListConfig:
    """list: list the downloaded models."""

    json: bool = opt(False, "--json", "switch", help="machine-readable output")


@dataclass(frozen=True, slots=True)
class RemoveConfig:
    """rm: remove models from the cache."""

    args: tuple[str, ...] = arguments("NAME...")
    yes: bool = opt(False, "-y --yes", "switch", help="do not ask")


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """doctor: measure the peak performance of this machine and the speed a model can reach on it."""

    model: Path | None = opt(None, "-m --model", "path", form="FILE", example="-m model.gguf",
        help="also report the peak speed of this model, what limits it, and which flags help")
    n_ctx: int = opt(0, "-c --ctx-size", "int", form="N", example="-c 32768", minimum=0,
        help="context size (default: the training context of the model, as in other commands)")
    n_ubatch: int = opt(512, "-ub --ubatch-size", "int", form="N", example="-ub 2048", minimum=1,
        help="micro-batch of prompts")
    n_threads: int = opt(0, "-t --threads", "custom", form="N", example="-t 8", parse=parse_threads,
        help="threads; auto = physical cores")
    quick: bool = opt(False, "--quick", "switch", help="measure nothing")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class HelpConfig:
    """help: show pages of the manual."""

    args: tuple[str, ...] = arguments("[TOPIC | COMMAND]", most=1)


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """version: show what is installed."""

    verbose: bool = opt(False, "-v --verbose", "switch", help="also print the environment")


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
"""Options by command. All other commands run a model and take the options of RunConfig."""
