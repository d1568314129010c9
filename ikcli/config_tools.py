"""Options of the commands that run no model: what `config.py` is for the others. One dataclass per command.

A field made by `arguments()` takes what is no option: files, types, numbers.
"""

# ruff: noqa: E501, RUF009  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.config_fleet import BatchConfig, FleetConfig
from ikcli.config_hub import HubConfig
from ikcli.config_values import parse_text_item, parse_threads
from ikcli.options import arguments, group, opt

CPU_TENSORS = "exps"
"""Tensors that stay on the CPU where `ik quantize` is not told which."""


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """quantize and repack: the options of the reference's quantize, and those that choose types for a size."""

    args: tuple[str, ...] = arguments("in.gguf [out.gguf] TYPE [nthreads]")
    imatrix: str | None = opt(None, "--imatrix", "str", "importance matrix, legacy .dat or GGUF", form="FILE", example="--imatrix imatrix.dat")
    covariance: str | None = opt(None, "--covariance", "str", "second moments of inputs (ik imatrix --covariance): errors are made up for by later columns, which lowers the divergence by a third and more and takes some times as long; self: the model is run on random tokens first, no text is needed", form="FILE|self", example="--covariance self")
    covariance_tokens: int = opt(16384, "--covariance-tokens", "int", "random tokens for --covariance self", form="N", example="--covariance-tokens 32768", minimum=512)
    hide_imatrix: bool = opt(False, "--hide-imatrix", "switch", "do not record the importance matrix in the result")
    ignore_imatrix_rules: bool = opt(False, "--ignore-imatrix-rules", "switch", "allow IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S (and _R4), IQ1_KT, IQ2_KT and Q2_K_S without importance matrix; they are refused otherwise because the result is hardly usable")
    include_weights: tuple[str, ...] = opt((), "--include-weights", "custom", "use only importance entries whose name contains TEXT (repeatable)", form="TEXT", example="--include-weights ffn", parse=parse_text_item, repeat=True)
    exclude_weights: tuple[str, ...] = opt((), "--exclude-weights", "custom", "use no importance entries whose name contains TEXT (repeatable)", form="TEXT", example="--exclude-weights attn", parse=parse_text_item, repeat=True)
    allow_requantize: bool = opt(False, "--allow-requantize", "switch", "accept tensors that are quantized already; this loses quality")
    leave_output_tensor: bool = opt(False, "--leave-output-tensor", "switch", "keep output.weight as it is")
    pure: bool = opt(False, "--pure", "switch", "the type of TYPE for all tensors, without its mix and without --custom-q")
    output_tensor_type: str | None = opt(None, "--output-tensor-type", "str", "tensor type of output.weight, whatever the other rules say", form="TYPE", example="--output-tensor-type q8_0")
    token_embedding_type: str | None = opt(None, "--token-embedding-type", "str", "tensor type of token_embd.weight, whatever the other rules say", form="TYPE", example="--token-embedding-type q8_0")
    per_layer_token_embedding_type: str | None = opt(None, "--per-layer-token-embedding-type", "str", "tensor type of per_layer_token_embd.weight, whatever the other rules say", form="TYPE", example="--per-layer-token-embedding-type q8_0")
    ffn_gate_inp_type: str | None = opt(None, "--ffn-gate-inp-type", "str", "tensor type of the routers (ffn_gate_inp), which otherwise stay as they are", form="TYPE", example="--ffn-gate-inp-type q8_0")
    attn_q_type: str | None = opt(None, "--attn-q-type", "str", "tensor type of attn_q, where the mix of TYPE decides", form="TYPE", example="--attn-q-type q8_0")
    attn_k_type: str | None = opt(None, "--attn-k-type", "str", "tensor type of attn_k, where the mix of TYPE decides", form="TYPE", example="--attn-k-type q8_0")
    attn_v_type: str | None = opt(None, "--attn-v-type", "str", "tensor type of attn_v, where the mix of TYPE decides", form="TYPE", example="--attn-v-type q8_0")
    attn_qkv_type: str | None = opt(None, "--attn-qkv-type", "str", "tensor type of attn_qkv; accepted, but attn_q rules decide about it", form="TYPE", example="--attn-qkv-type q8_0")
    attn_output_type: str | None = opt(None, "--attn-output-type", "str", "tensor type of attn_output, where the mix of TYPE decides", form="TYPE", example="--attn-output-type q8_0")
    ffn_gate_type: str | None = opt(None, "--ffn-gate-type", "str", "tensor type of ffn_gate, where the mix of TYPE decides", form="TYPE", example="--ffn-gate-type q8_0")
    ffn_down_type: str | None = opt(None, "--ffn-down-type", "str", "tensor type of ffn_down, where the mix of TYPE decides", form="TYPE", example="--ffn-down-type q8_0")
    ffn_up_type: str | None = opt(None, "--ffn-up-type", "str", "tensor type of ffn_up, where the mix of TYPE decides", form="TYPE", example="--ffn-up-type q8_0")
    custom_q: tuple[str, ...] = opt((), "--custom-q --tensor-type", "custom", "type of tensors whose name matches, first match wins; @FILE reads rules from a file with # comments (repeatable)", form="RE=TYPE[,RE=TYPE...]", example='--custom-q "attn_k=q8_0,ffn_down=iq4_k"', parse=parse_text_item, repeat=True)
    tensor_type_file: Path | None = opt(None, "--tensor-type-file", "path", "file of rules as those of --custom-q, separated by blanks or line ends; they follow those of --custom-q", form="FILE", example="--tensor-type-file types.txt")

    target_size: str | None = opt(None, "--target-size", "str", "choose the types so that all tensors together have at most SIZE (12GiB, 900M) and the damage is least; gpu=SIZE,cpu=SIZE gives both sides a budget of their own. TYPE may be missing; --custom-q rules and --*-type options still decide about their tensors", form="SIZE", example="--target-size 12GiB")
    target_bpw: str | None = opt(None, "--target-bpw", "str", "as --target-size, in bits per weight (3.6 or gpu=5.5,cpu=2.7)", form="F", example="--target-bpw 3.6")
    target_size_gpu: str | None = opt(None, "--target-size-gpu", "str", "budget of the tensors on the GPU; the CPU has the rest of the target", form="SIZE", example="--target-size-gpu 8GiB")
    target_size_cpu: str | None = opt(None, "--target-size-cpu", "str", "budget of the tensors on the CPU; the GPU has the rest of the target", form="SIZE", example="--target-size-cpu 64GiB")
    cpu_tensors: tuple[str, ...] = opt((), "--cpu-tensors", "custom", f"tensors that stay on the CPU (default {CPU_TENSORS}): for a target they get types that have a row-interleaved _R4 or _R8 form; none: no tensor (repeatable)", form="RE[,RE...]", example=f"--cpu-tensors {CPU_TENSORS}", parse=parse_text_item, repeat=True)
    gpu_tensors: tuple[str, ...] = opt((), "--gpu-tensors --gpu", "custom", "tensors on the GPU, before --cpu-tensors (repeatable)", form="RE[,RE...]", example="--gpu-tensors attn", parse=parse_text_item, repeat=True)
    override_tensor: tuple[str, ...] = opt((), "-ot --override-tensor", "custom", "the placement of a run command, to tell which tensors are on the CPU; the first matching rule wins, tensors without rule are on the GPU (repeatable)", form="RE=BUF[,RE=BUF...]", example="-ot exps=CPU", parse=parse_text_item, repeat=True)
    candidates: str | None = opt(None, "--candidates", "str", "tensor types to choose from for a target", form="TYPE[,TYPE...]", example="--candidates iq3_k,q6_K")
    repackable: bool = opt(False, "--repackable", "switch", "for a target, choose only types that --repack and -rtr can interleave")
    r4: bool = opt(False, "--r4", "switch", "for a target, write the tensors of the CPU row-interleaved (_R4, _R8)")
    target_rows: int | None = opt(None, "--target-rows", "int", "rows per tensor to measure for a target; 0 = all (default 256)", form="N", example="--target-rows 64", minimum=0)
    calibrate: str | None = opt(None, "--calibrate", "str", "for a target, measure by running the model on this text file what quantizing each group of tensors costs", form="TEXT", example="--calibrate text.txt")
    calibrate_chunks: int | None = opt(None, "--calibrate-chunks", "int", "chunks of 512 tokens to run (default 8, -1 = all)", form="N", example="--calibrate-chunks 16", minimum=-1)
    calibrate_groups: int | None = opt(None, "--calibrate-groups", "int", "most groups to measure, each is run twice (default 64)", form="N", example="--calibrate-groups 100", minimum=1)
    study: str | None = opt(None, "--study", "str", "for a target, take what ik study measured (its journal) for what quantizing a tensor costs", form="FILE", example="--study study.jsonl")
    write_recipe: str = opt("", "--write-recipe", "str", "write the types as rules for --custom-q @FILE; for a target they are printed otherwise", form="FILE", example="--write-recipe recipe.txt")

    matrix: str = opt("", "--matrix", "str", "write many quants in one pass over the model: in.gguf OUT instead of the arguments, OUT a folder or a pattern with {name}; every line of FILE is TYPE [NAME] [options that choose types], # begins a comment. Options of a line replace those of the command", form="FILE", example="--matrix quants.txt")
    extra_output_tensor: str | None = opt(None, "--extra-output-tensor", "str", "also write output_extra.weight, a smaller copy of the output", form="TYPE", example="--extra-output-tensor iq4_xs")
    repack: bool = opt(False, "--repack", "switch", "only regroup rows into interleaved types; TYPE may be missing and is ignored")
    unrepack: bool = opt(False, "--unrepack", "switch", "the inverse of --repack")
    repack_pattern: tuple[str, ...] = opt((), "--repack-pattern", "custom", "regroup only matching tensors, copy the rest (repeatable)", form="RE[,RE...]", example="--repack-pattern exps", parse=parse_text_item, repeat=True)
    keep_split: bool = opt(False, "--keep-split", "switch", "write as many files as the input has, with the same tensors in each")
    partial_requant: bool = opt(False, "--partial-requant", "switch", "skip output files that exist already: resume after an interruption")
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", "change a metadata key; TYPE int, float, bool or str (repeatable)", form="KEY=TYPE:VALUE", example="--override-kv general.name=str:mine", parse=parse_text_item, repeat=True)
    symmetric_q40: bool = opt(False, "--symmetric-q40", "switch", "q4_0 codes from -7 to 7 only, without importance weights")
    least_squares: bool = opt(False, "--least-squares", "switch", "scales of least squared error, which shrink rows, instead of unbiased ones")
    slow_iq2ks: bool = opt(False, "--slow-iq2ks", "switch", "the exhaustive and slow search for iq2_ks")
    force: bool = opt(False, "--force", "switch", "allow ternary types for weights that are not ternary")
    strict: bool = opt(False, "--strict", "switch", "rules that match nothing (--custom-q, --repack-pattern, --include-weights and the like) are errors")
    dry_run: bool = opt(False, "--dry-run", "switch", "print the type and size of every tensor and the total, write nothing")
    preflight: bool = opt(False, "--preflight", "switch", "check everything that can be known before a run, name tensors and experts without importance data, write nothing; exit code 1 if the run would fail or be refused")
    n_threads: str | None = opt(None, "-t --threads", "str", "threads, as the positional nthreads; auto = physical cores", form="N", example="-t 8")
    verbose: bool = opt(False, "-v --verbose", "switch", "also print which rule decided about which tensor")
    hub: HubConfig = group(HubConfig)
    fleet: BatchConfig = group(BatchConfig)


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    """convert: a checkpoint directory (config.json, safetensors) as a GGUF file of any type."""

    args: tuple[str, ...] = arguments("DIR", most=1)
    outfile: str | None = opt(None, "-o --outfile --output", "str", "the file to write, or a folder; {ftype} stands for the type. Default: named after the model, in DIR", form="FILE", example="--outfile model-{ftype}.gguf")
    outtype: str | None = opt(None, "--outtype", "str", "f32, f16, bf16, auto (the default: that of the checkpoint), or any TYPE of ik quantize, as if its f32 file were quantized", form="TYPE", example="--outtype iq4_k")
    model_name: str | None = opt(None, "--model-name", "str", "general.name, otherwise from the directory or model card", form="NAME", example='--model-name "My Model 7B"', text=True)
    metadata: Path | None = opt(None, "--metadata", "path", "JSON file with general.* keys that replace those found", form="FILE", example="--metadata keys.json")
    vocab_only: bool = opt(False, "--vocab-only", "switch", "write keys and vocabulary, no tensors")
    base: Path | None = opt(None, "--base", "path", "of an adapter (DIR has adapter_config.json): directory or config.json of its base model, unless that is where the adapter says", form="DIR", example="--base Llama-3.1-8B")
    pre: str | None = opt(None, "--pre", "str", "name of the pre-tokenizer, where it is not recognised", form="NAME", example="--pre qwen2")
    ignore_config_key: tuple[str, ...] = opt((), "--ignore-config-key", "custom", "keys of config.json that are not understood and do not change the result (repeatable)", form="KEY[,KEY...]", example="--ignore-config-key my_note", parse=parse_text_item, repeat=True)

    imatrix: str | None = opt(None, "--imatrix", "str", "importance matrix, legacy .dat or GGUF", form="FILE", example="--imatrix imatrix.dat")
    ignore_imatrix_rules: bool = opt(False, "--ignore-imatrix-rules", "switch", "allow types that are hardly usable without importance matrix")
    strict: bool = opt(False, "--strict", "switch", "rules of --custom-q that match nothing are errors")
    custom_q: tuple[str, ...] = opt((), "--custom-q", "custom", "type of tensors whose name (in GGUF) matches, first match wins; @FILE reads rules from a file (repeatable)", form="RE=TYPE[,RE=TYPE...]", example='--custom-q "attn_k=q8_0,ffn_down=iq4_k"', parse=parse_text_item, repeat=True)
    pure: bool = opt(False, "--pure", "switch", "the type of TYPE for all tensors, without its mix and without --custom-q")
    leave_output_tensor: bool = opt(False, "--leave-output-tensor", "switch", "keep output.weight as it is")
    output_tensor_type: str | None = opt(None, "--output-tensor-type", "str", "tensor type of output.weight, whatever the other rules say", form="TYPE", example="--output-tensor-type q8_0")
    token_embedding_type: str | None = opt(None, "--token-embedding-type", "str", "tensor type of token_embd.weight, whatever the other rules say", form="TYPE", example="--token-embedding-type q8_0")
    target_size: str | None = opt(None, "--target-size", "str", "choose the types so that all tensors together have at most SIZE and the damage is least, as ik quantize does", form="SIZE", example="--target-size 12GiB")
    target_bpw: str | None = opt(None, "--target-bpw", "str", "as --target-size, in bits per weight", form="F", example="--target-bpw 3.6")

    split_max_size: str | None = opt(None, "--split-max-size", "str", "bytes of tensors per file at most", form="N(M|G)", example="--split-max-size 2G")
    split_max_tensors: int = opt(0, "--split-max-tensors", "int", "tensors per file at most; 0 = no limit", form="N", example="--split-max-tensors 128", minimum=0)
    resume: bool = opt(False, "--resume --partial-requant", "switch", "skip files of a split result that are complete: go on after an interruption (one file goes on by itself)")
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", "change a metadata key; TYPE int, float, bool or str (repeatable)", form="KEY=TYPE:VALUE", example="--override-kv general.name=str:mine", parse=parse_text_item, repeat=True)
    dry_run: bool = opt(False, "--dry-run", "switch", "print the type and size of every tensor and the total, write nothing")
    n_threads: str | None = opt(None, "-t --threads", "str", "threads; auto = physical cores", form="N", example="-t 8")
    json: bool = opt(False, "--json", "switch", "print files, types and sizes as JSON")
    verbose: bool = opt(False, "-v --verbose", "switch", "also print which rule decided, and which tensors were left out")
    print_supported_models: bool = opt(False, "--print-supported-models", "switch", "list the classes of models that can be converted, with the architecture of their files, and stop")
    remote: bool = opt(False, "--remote", "switch", "not here: ik pull fetches a model first")
    no_lazy: bool = opt(False, "--no-lazy", "switch", "accepted; tensors are always read piece by piece")
    use_temp_file: bool = opt(False, "--use-temp-file", "switch", "accepted; memory is bounded anyway")


@dataclass(frozen=True, slots=True)
class QuantizeStatsConfig:
    """quantize-stats: error of tensor types on the tensors of a model."""

    model: str | None = opt(None, "-m --model", "str", "model to measure; default the bundled demo model", form="FILE", example="-m model.gguf")
    types: tuple[str, ...] = opt((), "--type --types", "custom", "tensor types to measure, or all (the default) (repeatable)", form="TYPE[,TYPE...]", example="--type q4_K,iq4_k", parse=parse_text_item, repeat=True)
    imatrix: str | None = opt(None, "--imatrix", "str", "importance matrix: used by the encoders and for the column `weighted`", form="FILE", example="--imatrix imatrix.dat")
    include: tuple[str, ...] = opt((), "-l --include --include-layer", "custom", "measure only tensors whose name matches (repeatable)", form="RE", example="-l attn", parse=parse_text_item, repeat=True)
    exclude: tuple[str, ...] = opt((), "-L --exclude --exclude-layer", "custom", "leave out tensors whose name matches (repeatable)", form="RE", example="-L exps", parse=parse_text_item, repeat=True)
    rows: int = opt(256, "--rows", "int", "rows measured per tensor, spread evenly; 0 = all", form="N", example="--rows 1024", minimum=0)
    summary: bool = opt(False, "--summary", "switch", "print only the rows over all tensors")
    output_format: str = opt("md", "--output-format", "choice", "form of the table; jsonl has the full counts of scales and codes", form="md|jsonl", example="--output-format jsonl", choices=("md", "jsonl"))
    n_threads: int = opt(0, "-t --threads", "custom", "threads; auto = physical cores", form="N", example="-t 8", parse=parse_threads)
    fleet: BatchConfig = group(BatchConfig)
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """study: what each tensor costs in each type."""

    model: str | None = opt(None, "-m --model", "str", "model to measure, f16 or bf16 for exact results; default the bundled demo model", form="FILE", example="-m model-f16.gguf")
    file: str | None = opt(None, "-f --file", "str", "text to measure on; default the bundled text", form="FILE", example="-f wiki.test.raw")
    types: tuple[str, ...] = opt((), "--types --type", "custom", "tensor types to measure (default iq2_k,iq3_k,iq4_k,iq6_k)", form="TYPE[,TYPE...]", example="--types iq3_k,iq4_k,q6_K", parse=parse_text_item, repeat=True)
    tensors: tuple[str, ...] = opt((), "-l --tensors --include", "custom", "measure only tensors whose name matches (repeatable)", form="RE", example="--tensors ffn_down", parse=parse_text_item, repeat=True)
    exclude: tuple[str, ...] = opt((), "-L --exclude", "custom", "leave out tensors whose name matches (repeatable)", form="RE", example="--exclude token_embd", parse=parse_text_item, repeat=True)
    by: str = opt("tensor", "--by", "choice", "what is quantized at a time: one tensor (up and gate experts together), the tensors of one name in all blocks, or all of a block", form="tensor|role|block", example="--by role", choices=("tensor", "role", "block"))
    imatrix: str | None = opt(None, "--imatrix", "str", "importance matrix for the encoders", form="FILE", example="--imatrix imatrix.dat")
    chunks: int = opt(16, "--chunks", "int", "chunks of the text to use at most; -1 = all", form="N", example="--chunks 32", minimum=-1)
    n_ctx: int = opt(512, "-c --ctx-size", "int", "tokens of a chunk", form="N", example="-c 512", minimum=16)
    precision: float = opt(0.05, "--precision", "float", "a measurement ends when its standard error is this share of the divergence; 0 = after all chunks", form="F", example="--precision 0.02")
    journal: str | None = opt(None, "-o --journal", "str", "keep every result in FILE; a run that ended early goes on from there", form="FILE", example="-o study.jsonl")
    show: str | None = opt(None, "--show", "str", "measure nothing, print the table of a journal", form="FILE", example="--show study.jsonl")
    plot: str | None = opt(None, "--plot", "str", "draw the results into FILE (.png, .svg, .pdf)", form="FILE", example="--plot study.png")
    json: bool = opt(False, "--json", "switch", "machine-readable output")
    fleet: FleetConfig = group(FleetConfig)
    prefix_mib: int = opt(2048, "--prefix-memory", "int", "MiB to keep what layers leave behind, so that a change is computed from its layer on", form="MiB", example="--prefix-memory 8192", minimum=0)
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", "change a metadata key; TYPE int, float, bool or str (repeatable)", form="KEY=TYPE:VALUE", example="--override-kv deepseek2.expert_used_count=int:6", parse=parse_text_item, repeat=True)
    n_threads: int = opt(0, "-t --threads", "custom", "threads of all workers together, on a cluster of each; auto = physical cores", form="N", example="-t 8", parse=parse_threads)
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class GgufSplitConfig:
    """gguf-split: a model in parts, or parts in one file."""

    args: tuple[str, ...] = arguments("IN OUT")
    split: bool = opt(False, "--split", "switch", "split IN into OUT-00001-of-0000N.gguf ... (the default)")
    merge: bool = opt(False, "--merge", "switch", "merge all parts of IN, given its first part, into the file OUT")
    max_tensors: int | None = opt(None, "--split-max-tensors", "int", "tensors per part at most, default 128", form="N", example="--split-max-tensors 128", minimum=1)
    max_size: str | None = opt(None, "--split-max-size", "str", "bytes of tensors per part at most", form="N(M|G)", example="--split-max-size 2G")
    no_tensor_first: bool = opt(False, "--no-tensor-first-split", "switch", "the first part holds metadata only")
    dry_run: bool = opt(False, "--dry-run", "switch", "print the parts and write nothing")


@dataclass(frozen=True, slots=True)
class SweepPlotConfig:
    """sweep-bench-plot: runs of sweep-bench in a plot."""

    args: tuple[str, ...] = arguments("FILE...")
    labels: str | None = opt(None, "--labels", "str", "names of the curves, one per file or one per table", form="A,B,...", example="--labels before,after", text=True)
    output: str | None = opt(None, "-o --output", "str", "prefix of the two files NAME_pp.png and NAME_tg.png (default performance_comparison); a NAME that ends in .png, .svg or .pdf gets both panels in one figure", form="NAME", example="-o runs")


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """report: results of many runs on one page."""

    args: tuple[str, ...] = arguments("[LABEL=]FILE...")
    output: Path = opt(Path("report.html"), "-o --output", "path", "the page; it needs no other file", form="FILE", example="-o report.html")
    title: str = opt("Results", "--title", "str", "heading of the page", form="TEXT", example='--title "Genoa, November"', text=True)
    size: tuple[str, ...] = opt((), "--size", "custom", "size of the model of a label whose log does not tell it (12.5GiB, 900MiB, or a GGUF file) (repeatable)", form="LABEL=SIZE", example="--size IQ4_K=3.8GiB", parse=parse_text_item, repeat=True)
    json: bool = opt(False, "--json", "switch", "print what was read as one JSON object, write no page")


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """publish: quants of a model as a folder for a hub."""

    args: tuple[str, ...] = arguments("[LABEL=]MODEL...")
    out: Path | None = opt(None, "-o --out", "path", "the folder to make; it must be new or empty", form="DIR", example="--out My-Model-GGUF")
    name: str = opt("", "--name", "str", "name of the model in file names; default general.name", form="NAME", example="--name My-Model-7B", text=True)
    base_model: str = opt("", "--base-model", "str", "the model that was quantized, for the card; default what the metadata say", form="USER/REPO", example="--base-model Qwen/Qwen3-8B")
    license: str = opt("", "--license", "str", "for the card; default general.license", form="ID", example="--license apache-2.0")
    split_max_size: str | None = opt(None, "--split-max-size", "str", "split larger models into parts of so many bytes at most, in a folder each", form="N(M|G)", example="--split-max-size 50G")
    imatrix: Path | None = opt(None, "--imatrix", "path", "the importance matrix, to be copied into the folder", form="FILE", example="--imatrix imatrix.gguf")
    results: tuple[str, ...] = opt((), "--results", "custom", "logs of ik perplexity, with or without --kl-divergence, whose PPL and KLD the card shows; anything ik report reads. LABEL tells the quant where the log does not (repeatable)", form="[LABEL=]FILE", example="--results Q4_K_M=q4.log", parse=parse_text_item, repeat=True)
    note: tuple[str, ...] = opt((), "--note", "custom", "a text for the card, for example the command of a step (repeatable)", form="TEXT", example='--note "ik imatrix -m model.gguf -f text.txt"', parse=parse_text_item, repeat=True, text=True)
    source: tuple[str, ...] = opt((), "--source", "custom", "a file the quants were made of; the card gets its SHA-256 (repeatable)", form="FILE", example="--source model-BF16.gguf", parse=parse_text_item, repeat=True)
    link: bool = opt(False, "--link", "switch", "hard links instead of copies of models that need no splitting")
    dry_run: bool = opt(False, "--dry-run", "switch", "check everything, print files and sizes, write nothing")
    upload: str = opt("", "--upload", "str", "send the folder to this repository of the hub, made if it is not there; only what it lacks, so the same command goes on where it was stopped. Without models: the folder as it is", form="USER/REPO", example="--upload me/My-Model-GGUF")
    private: bool = opt(False, "--private", "switch", "with --upload: a new repository is private")
    revision: str = opt("", "--revision", "str", "with --upload: to this branch, made if it is not there, or to the pull request refs/pr/N; default main", form="BRANCH", example="--revision refs/pr/3")
    create_pr: bool = opt(False, "--create-pr", "switch", "with --upload: as a pull request")
    token: str = opt("", "--token -hft --hf-token", "str", "with --upload: access token with the right to write; default HF_TOKEN, or that of hf auth login", form="TOKEN", example="--token hf_...")
    offline: bool = opt(False, "--offline", "switch", "ask no server; refuses --upload (also HF_HUB_OFFLINE=1)")
    json: bool = opt(False, "--json", "switch", "print what was made as JSON")


@dataclass(frozen=True, slots=True)
class InspectConfig:
    """inspect: what is in a GGUF file, how two differ, and changes of metadata."""

    args: tuple[str, ...] = arguments("[FILE [OTHER]]", most=2)
    model: str | None = opt(None, "-m --model", "str", "the same as FILE; default the bundled demo model", form="FILE", example="-m model.gguf")
    tensors: bool = opt(False, "--tensors", "switch", "list every tensor: of the file, of --match, or all that differ")
    json: bool = opt(False, "--json", "switch", "machine-readable output")
    diff: bool = opt(False, "--diff", "switch", "compare FILE with OTHER: metadata, types, tensors that only one has, and numbers, relative to FILE")
    match: tuple[str, ...] = opt((), "--match", "custom", "which tensors a rule takes, how many bytes, and which earlier rule took them: RE=BUF as of -ot, RE=TYPE as of --custom-q, or an expression alone; @FILE: one rule per line (repeatable)", form="RULE[,RULE...]", example="--match exps=CPU", parse=parse_text_item, repeat=True)
    hash: str | None = opt(None, "--hash", "str", "digests of the data of every tensor and of the model, as gguf-hash prints them: xxh64, sha1, sha256, uuid, or all (the first three)", form="KIND[,KIND...]", example="--hash sha256")
    no_layer: bool = opt(False, "--no-layer", "switch", "with --hash: only the digests of the whole model")
    check: Path | None = opt(None, "-c --check", "path", "compute the digests of a file that --hash or gguf-hash printed and compare; exit code 1 if one differs or none is known", form="FILE", example="--check model.sha256")
    sets: tuple[str, ...] = opt((), "--set", "custom", "set a metadata key; TYPE str, bool, int, float (these keep the type the key has), u8 to u64, i8 to i64, f32, f64, or one of them with [] and a JSON list (repeatable)", form="KEY=TYPE:VALUE", example="--set general.name=str:mine", parse=parse_text_item, repeat=True)
    set_files: tuple[str, ...] = opt((), "--set-file", "custom", "set a metadata key to the text of a file (repeatable)", form="KEY=@FILE", example="--set-file tokenizer.chat_template=@chat.jinja", parse=parse_text_item, repeat=True)
    deletes: tuple[str, ...] = opt((), "--delete", "custom", "delete a metadata key (repeatable)", form="KEY", example="--delete tokenizer.chat_template", parse=parse_text_item, repeat=True)
    output: Path | None = opt(None, "-o --output", "path", "write the changed model here; without it the header of FILE is changed in place if it keeps its size", form="FILE", example="-o changed.gguf")
    force: bool = opt(False, "--force", "switch", "change keys that say how tensors are read, and replace an existing output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """tokenize: the tokens of a text."""

    model: str | None = opt(None, "-m --model", "str", "GGUF model or vocabulary; default the bundled demo model", form="FILE", example="-m model.gguf")
    prompt: str | None = opt(None, "-p --prompt", "str", "text to tokenize", form="TEXT", example='-p "Once upon a time"', text=True)
    file: str | None = opt(None, "-f --file", "str", "read the text here", form="FILE", example="-f text.txt")
    stdin: bool = opt(False, "--stdin", "switch", "read the text from standard input")
    ids: bool = opt(False, "--ids", "switch", "print only the ids, as [1, 2, 3]")
    no_bos: bool = opt(False, "--no-bos", "switch", "never add a BOS token")
    no_escape: bool = opt(False, "--no-escape", "switch", "accepted; backslashes are never interpreted")
    no_parse_special: bool = opt(False, "--no-parse-special", "switch", "take the names of control tokens as text")
    log_disable: bool = opt(False, "--log-disable", "switch", "no warnings on stderr")
    show_count: bool = opt(False, "--show-count", "switch", "print the number of tokens")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """devices: what a run can use on this machine."""

    json: bool = opt(False, "--json", "switch", "machine-readable output")
    self_test: bool = opt(False, "--self-test", "switch", "compute the first layers of a model on all devices, compare every op with NumPy and name the one that is wrong")
    model: Path | None = opt(None, "-m --model", "path", "model of the self-test; default: the bundled one", form="FILE", example="-m model.gguf")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class PullConfig:
    """pull: a model from a hub or a URL into the cache."""

    args: tuple[str, ...] = arguments("USER/REPO[:QUANT] | URL", most=1)
    list: bool = opt(False, "--list", "switch", "show the quants of the repository and whether they would fit this machine, and download none")
    n_ctx: int = opt(8192, "-c --ctx-size", "int", "context of the runs that --list plans", form="N", example="-c 32768", minimum=1)
    checkpoint: bool = opt(False, "--checkpoint", "switch", "the safetensors, config and tokenizer of the repository, for ik convert")
    file: str = opt("", "-hff --hf-file", "str", "the file of the repository to get; of a split model any part", form="FILE", example="-hff model-Q4_K_M.gguf")
    token: str = opt("", "-hft --hf-token", "str", "access token for private and gated repositories; default HF_TOKEN, or that of hf auth login", form="TOKEN", example="-hft hf_...")
    offline: bool = opt(False, "--offline", "switch", "ask no server: the path of what is there", env="LLAMA_ARG_OFFLINE")
    json: bool = opt(False, "--json", "switch", "machine-readable output")


@dataclass(frozen=True, slots=True)
class ListConfig:
    """list: the models that have been downloaded."""

    json: bool = opt(False, "--json", "switch", "machine-readable output")


@dataclass(frozen=True, slots=True)
class RemoveConfig:
    """rm: models out of the cache."""

    args: tuple[str, ...] = arguments("NAME...")
    yes: bool = opt(False, "-y --yes", "switch", "do not ask")


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """doctor: what this machine can do, and what a model can expect of it."""

    model: Path | None = opt(None, "-m --model", "path", "also tell how fast this model can be at most, what limits it, and which flags help", form="FILE", example="-m model.gguf")
    n_ctx: int = opt(0, "-c --ctx-size", "int", "context of the model (default: what it was trained for, as in other commands)", form="N", example="-c 32768", minimum=0)
    n_ubatch: int = opt(512, "-ub --ubatch-size", "int", "micro-batch of prompts", form="N", example="-ub 2048", minimum=1)
    n_threads: int = opt(0, "-t --threads", "custom", "threads; auto = physical cores", form="N", example="-t 8", parse=parse_threads)
    quick: bool = opt(False, "--quick", "switch", "measure nothing")
    json: bool = opt(False, "--json", "switch", "machine-readable output")
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class HelpConfig:
    """help: pages of the manual."""

    args: tuple[str, ...] = arguments("[TOPIC | COMMAND]", most=1)


@dataclass(frozen=True, slots=True)
class VersionConfig:
    """version: what is installed."""

    verbose: bool = opt(False, "-v --verbose", "switch", "environment too")


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
