"""Options of the commands that create and study quants: quantize, convert, quantize-stats, study."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.settings.fleet import BatchConfig, FleetConfig
from ikcli.settings.hub import HubConfig
from ikcli.settings.option import arguments, group, opt
from ikcli.settings.values import parse_size, parse_text_item, parse_threads

CPU_TENSORS = "exps"
"""Tensors on the CPU, unless options of `ik quantize` name others."""


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """quantize and repack: the options of the reference's quantize, and options that choose types for a target size."""

    args: tuple[str, ...] = arguments("in.gguf [out.gguf] TYPE [nthreads]")
    imatrix: str | None = opt(None, "--imatrix", "str", form="FILE", example="--imatrix imatrix.dat",
        help="importance matrix, legacy .dat or GGUF")
    covariance: str | None = opt(None, "--covariance", "str", form="FILE|self", example="--covariance self",
        help="second moments of inputs (ik imatrix --covariance) for error feedback: later columns compensate errors "
        "of earlier ones. This lowers the divergence by a third or more and takes several times as long. self: run "
        "the model on random tokens first; no text is needed")
    covariance_tokens: int = opt(16384, "--covariance-tokens", "int", form="N", example="--covariance-tokens 32768",
        minimum=512, help="random tokens for --covariance self")
    hide_imatrix: bool = opt(False, "--hide-imatrix", "switch",
        help="do not record the importance matrix in the result")
    ignore_imatrix_rules: bool = opt(False, "--ignore-imatrix-rules", "switch",
        help="allow IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S (and _R4), IQ1_KT, IQ2_KT and Q2_K_S without importance "
        "matrix; they are refused otherwise because the result is hardly usable")
    include_weights: tuple[str, ...] = opt((), "--include-weights", "custom", form="TEXT",
        example="--include-weights ffn", parse=parse_text_item, repeat=True,
        help="use only importance entries whose name contains TEXT (repeatable)")
    exclude_weights: tuple[str, ...] = opt((), "--exclude-weights", "custom", form="TEXT",
        example="--exclude-weights attn", parse=parse_text_item, repeat=True,
        help="ignore importance entries whose name contains TEXT (repeatable)")
    allow_requantize: bool = opt(False, "--allow-requantize", "switch",
        help="accept tensors that are already quantized; this loses quality")
    leave_output_tensor: bool = opt(False, "--leave-output-tensor", "switch", help="keep output.weight as it is")
    pure: bool = opt(False, "--pure", "switch",
        help="use the base type of TYPE for all tensors, without its mix and without --custom-q")
    output_tensor_type: str | None = opt(None, "--output-tensor-type", "str", form="TYPE",
        example="--output-tensor-type q8_0", help="tensor type of output.weight; overrides the other rules")
    token_embedding_type: str | None = opt(None, "--token-embedding-type", "str", form="TYPE",
        example="--token-embedding-type q8_0", help="tensor type of token_embd.weight; overrides the other rules")
    per_layer_token_embedding_type: str | None = opt(None, "--per-layer-token-embedding-type", "str", form="TYPE",
        example="--per-layer-token-embedding-type q8_0",
        help="tensor type of per_layer_token_embd.weight; overrides the other rules")
    ffn_gate_inp_type: str | None = opt(None, "--ffn-gate-inp-type", "str", form="TYPE",
        example="--ffn-gate-inp-type q8_0",
        help="tensor type of the routers (ffn_gate_inp), which otherwise keep their type")
    attn_q_type: str | None = opt(None, "--attn-q-type", "str", form="TYPE", example="--attn-q-type q8_0",
        help="tensor type of attn_q, where the mix of TYPE decides")
    attn_k_type: str | None = opt(None, "--attn-k-type", "str", form="TYPE", example="--attn-k-type q8_0",
        help="tensor type of attn_k, where the mix of TYPE decides")
    attn_v_type: str | None = opt(None, "--attn-v-type", "str", form="TYPE", example="--attn-v-type q8_0",
        help="tensor type of attn_v, where the mix of TYPE decides")
    attn_qkv_type: str | None = opt(None, "--attn-qkv-type", "str", form="TYPE", example="--attn-qkv-type q8_0",
        help="tensor type of attn_qkv; accepted, but attn_q rules decide about it")
    attn_output_type: str | None = opt(None, "--attn-output-type", "str", form="TYPE",
        example="--attn-output-type q8_0", help="tensor type of attn_output, where the mix of TYPE decides")
    ffn_gate_type: str | None = opt(None, "--ffn-gate-type", "str", form="TYPE", example="--ffn-gate-type q8_0",
        help="tensor type of ffn_gate, where the mix of TYPE decides")
    ffn_down_type: str | None = opt(None, "--ffn-down-type", "str", form="TYPE", example="--ffn-down-type q8_0",
        help="tensor type of ffn_down, where the mix of TYPE decides")
    ffn_up_type: str | None = opt(None, "--ffn-up-type", "str", form="TYPE", example="--ffn-up-type q8_0",
        help="tensor type of ffn_up, where the mix of TYPE decides")
    custom_q: tuple[str, ...] = opt((), "--custom-q --tensor-type", "custom", form="RE=TYPE[,RE=TYPE...]",
        example='--custom-q "attn_k=q8_0,ffn_down=iq4_k"', parse=parse_text_item, repeat=True,
        help="type of tensors whose name matches, first match wins; @FILE reads rules from a file with # comments "
        "(repeatable)")
    tensor_type_file: Path | None = opt(None, "--tensor-type-file", "path", form="FILE",
        example="--tensor-type-file types.txt",
        help="file of --custom-q rules, separated by blanks or line ends; they follow those of --custom-q")

    target_size: str | None = opt(None, "--target-size", "str", form="SIZE", example="--target-size 12GiB",
        help="choose the types so that all tensors together have at most SIZE (12GiB or 12G: 12*2^30 bytes; 12GB: "
        "12*10^9) and the damage is least; gpu=SIZE,cpu=SIZE gives both sides a budget of their own. TYPE may "
        "be missing; --custom-q rules and --*-type options still decide about their tensors")
    target_bpw: str | None = opt(None, "--target-bpw", "str", form="F", example="--target-bpw 3.6",
        help="same as --target-size, in bits per weight (3.6 or gpu=5.5,cpu=2.7)")
    target_size_gpu: str | None = opt(None, "--target-size-gpu", "str", form="SIZE", example="--target-size-gpu 8GiB",
        help="budget of the tensors on the GPU; the CPU has the rest of the target")
    target_size_cpu: str | None = opt(None, "--target-size-cpu", "str", form="SIZE", example="--target-size-cpu 64GiB",
        help="budget of the tensors on the CPU; the GPU has the rest of the target")
    cpu_tensors: tuple[str, ...] = opt((), "--cpu-tensors", "custom", form="RE[,RE...]",
        example=f"--cpu-tensors {CPU_TENSORS}", parse=parse_text_item, repeat=True,
        help=f"tensors that stay on the CPU (default {CPU_TENSORS}): for a target they get types that have a "
        "row-interleaved _R4 or _R8 form; none: no tensor (repeatable)")
    gpu_tensors: tuple[str, ...] = opt((), "--gpu-tensors --gpu", "custom", form="RE[,RE...]",
        example="--gpu-tensors attn", parse=parse_text_item, repeat=True,
        help="tensors on the GPU, before --cpu-tensors (repeatable)")
    override_tensor: tuple[str, ...] = opt((), "-ot --override-tensor", "custom", form="RE=BUF[,RE=BUF...]",
        example="-ot exps=CPU", parse=parse_text_item, repeat=True,
        help="placement rules of a run, which show the tensors on the CPU; the first matching rule wins, and "
        "tensors without a rule are on the GPU (repeatable)")
    candidates: str | None = opt(None, "--candidates", "str", form="TYPE[,TYPE...]", example="--candidates iq3_k,q6_K",
        help="tensor types to choose from for a target")
    repackable: bool = opt(False, "--repackable", "switch",
        help="for a target, choose only types that --repack and -rtr can interleave")
    r4: bool = opt(False, "--r4", "switch",
        help="for a target, write the tensors of the CPU row-interleaved (_R4, _R8)")
    target_rows: int | None = opt(None, "--target-rows", "int", form="N", example="--target-rows 64", minimum=0,
        help="rows per tensor to measure for a target; 0 = all (default 256)")
    calibrate: str | None = opt(None, "--calibrate", "str", form="TEXT", example="--calibrate text.txt",
        help="for a target, measure what quantizing each group of tensors costs by running the model on this text file")
    calibrate_chunks: int | None = opt(None, "--calibrate-chunks", "int", form="N", example="--calibrate-chunks 16",
        minimum=-1, help="chunks of 512 tokens to run (default 8, -1 = all)")
    calibrate_groups: int | None = opt(None, "--calibrate-groups", "int", form="N", example="--calibrate-groups 100",
        minimum=1, help="most groups to measure; each is run twice (default 64)")
    study: str | None = opt(None, "--study", "str", form="FILE", example="--study study.jsonl",
        help="for a target, take the cost of quantizing each tensor from the journal of ik study")
    write_recipe: str = opt("", "--write-recipe", "str", form="FILE", example="--write-recipe recipe.txt",
        help="write the types as rules for --custom-q @FILE; a target otherwise prints them")

    matrix: str = opt("", "--matrix", "str", form="FILE", example="--matrix quants.txt",
        help="write many quants in one pass over the model: in.gguf OUT instead of the arguments, OUT a folder or a "
        "pattern with {name}; every line of FILE is TYPE [NAME] [options that choose types], # begins a comment. "
        "Options on a line replace those of the command")
    extra_output_tensor: str | None = opt(None, "--extra-output-tensor", "str", form="TYPE",
        example="--extra-output-tensor iq4_xs", help="also write output_extra.weight, a smaller copy of the output")
    repack: bool = opt(False, "--repack", "switch",
        help="only regroup rows into interleaved types; TYPE may be missing and is ignored")
    unrepack: bool = opt(False, "--unrepack", "switch", help="the inverse of --repack")
    repack_pattern: tuple[str, ...] = opt((), "--repack-pattern", "custom", form="RE[,RE...]",
        example="--repack-pattern exps", parse=parse_text_item, repeat=True,
        help="regroup only matching tensors, copy the rest (repeatable)")
    mtp: bool = opt(False, "--mtp", "switch",
        help="write only the layers that predict further tokens (MTP), with embeddings and output matrix: a file for "
        "-md of --spec-type mtp")
    no_mtp: bool = opt(False, "--no-mtp", "switch",
        help="leave out the layers that predict further tokens (MTP)")
    keep_split: bool = opt(False, "--keep-split", "switch",
        help="write as many files as the input has, with the same tensors in each")
    partial_requant: bool = opt(False, "--partial-requant", "switch",
        help="resume after an interruption: skip output files that already exist")
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", form="KEY=TYPE:VALUE",
        example="--override-kv general.name=str:mine", parse=parse_text_item, repeat=True,
        help="change a metadata key; TYPE int, float, bool or str (repeatable)")
    symmetric_q40: bool = opt(False, "--symmetric-q40", "switch",
        help="q4_0 codes from -7 to 7 only, without importance weights")
    least_squares: bool = opt(False, "--least-squares", "switch",
        help="use scales of least squared error, which shrink rows, instead of unbiased ones")
    slow_iq2ks: bool = opt(False, "--slow-iq2ks", "switch", help="use the slow, exhaustive search for iq2_ks")
    force: bool = opt(False, "--force", "switch", help="allow ternary types for weights that are not ternary")
    strict: bool = opt(False, "--strict", "switch",
        help="treat rules that match nothing (--custom-q, --repack-pattern, --include-weights, ...) as errors")
    dry_run: bool = opt(False, "--dry-run", "switch",
        help="print the type and size of every tensor and the total, write nothing")
    preflight: bool = opt(False, "--preflight", "switch",
        help="check everything that can be checked before a run, name tensors and experts without importance data, "
        "and write nothing; exit code 1 if the run would fail or be refused")
    n_threads: str | None = opt(None, "-t --threads", "str", form="N", example="-t 8",
        help="threads, same as the positional nthreads; auto = physical cores")
    verbose: bool = opt(False, "-v --verbose", "switch", help="also print which rule decided about which tensor")
    hub: HubConfig = group(HubConfig)
    fleet: BatchConfig = group(BatchConfig)


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    """convert: a checkpoint directory (config.json, safetensors) to a GGUF file of any type."""

    args: tuple[str, ...] = arguments("DIR", most=1)
    outfile: str | None = opt(None, "-o --outfile --output", "str", form="FILE", example="--outfile model-{ftype}.gguf",
        help="the file to write, or a folder; {ftype} stands for the type. Default: named after the model, in DIR")
    outtype: str | None = opt(None, "--outtype", "str", form="TYPE", example="--outtype iq4_k",
        help="f32, f16, bf16, auto (the default: the type of the checkpoint), or any TYPE of ik quantize, with the "
        "result of quantizing the f32 file")
    model_name: str | None = opt(None, "--model-name", "str", form="NAME", example='--model-name "My Model 7B"',
        text=True, help="general.name; default: from the directory or model card")
    metadata: Path | None = opt(None, "--metadata", "path", form="FILE", example="--metadata keys.json",
        help="JSON file with general.* keys, which replace those of the checkpoint")
    vocab_only: bool = opt(False, "--vocab-only", "switch", help="write keys and vocabulary, no tensors")
    mmproj: bool = opt(False, "--mmproj", "switch",
        help="write the projector of the checkpoint, with which the model reads images (docs/vision.md), as f32, f16 "
        "or bf16")
    base: Path | None = opt(None, "--base", "path", form="DIR", example="--base Llama-3.1-8B",
        help="for an adapter (DIR has adapter_config.json): directory or config.json of its base model, unless the "
        "adapter names its place")
    mtp: bool = opt(False, "--mtp", "switch",
        help="write only the layers that predict further tokens (MTP), with embeddings and output matrix, as "
        "llama.cpp reads them. By default they are part of the model file, where ik drafts with them")
    no_mtp: bool = opt(False, "--no-mtp", "switch",
        help="leave out the layers that predict further tokens (MTP)")
    target_model_dir: Path | None = opt(None, "--target-model-dir", "path", form="DIR",
        example="--target-model-dir Qwen3-8B",
        help="for an EAGLE-3, DFlash or DSpark head: directory of the model that it drafts for, of which config.json "
        "and tokenizer are read")
    pre: str | None = opt(None, "--pre", "str", form="NAME", example="--pre qwen2",
        help="name of the pre-tokenizer, if it is not recognised")
    ignore_config_key: tuple[str, ...] = opt((), "--ignore-config-key", "custom", form="KEY[,KEY...]",
        example="--ignore-config-key my_note", parse=parse_text_item, repeat=True,
        help="unknown keys of config.json that do not change the result (repeatable)")

    imatrix: str | None = opt(None, "--imatrix", "str", form="FILE", example="--imatrix imatrix.dat",
        help="importance matrix, legacy .dat or GGUF")
    ignore_imatrix_rules: bool = opt(False, "--ignore-imatrix-rules", "switch",
        help="allow types that are hardly usable without importance matrix")
    strict: bool = opt(False, "--strict", "switch", help="treat --custom-q rules that match nothing as errors")
    custom_q: tuple[str, ...] = opt((), "--custom-q", "custom", form="RE=TYPE[,RE=TYPE...]",
        example='--custom-q "attn_k=q8_0,ffn_down=iq4_k"', parse=parse_text_item, repeat=True,
        help="type of tensors whose name (in GGUF) matches, first match wins; @FILE reads rules from a file "
        "(repeatable)")
    pure: bool = opt(False, "--pure", "switch",
        help="use the base type of TYPE for all tensors, without its mix and without --custom-q")
    leave_output_tensor: bool = opt(False, "--leave-output-tensor", "switch", help="keep output.weight as it is")
    output_tensor_type: str | None = opt(None, "--output-tensor-type", "str", form="TYPE",
        example="--output-tensor-type q8_0", help="tensor type of output.weight; overrides the other rules")
    token_embedding_type: str | None = opt(None, "--token-embedding-type", "str", form="TYPE",
        example="--token-embedding-type q8_0", help="tensor type of token_embd.weight; overrides the other rules")
    target_size: str | None = opt(None, "--target-size", "str", form="SIZE", example="--target-size 12GiB",
        help="choose the types so that all tensors together have at most SIZE with the least damage, as in ik quantize")
    target_bpw: str | None = opt(None, "--target-bpw", "str", form="F", example="--target-bpw 3.6",
        help="same as --target-size, in bits per weight")

    split_max_size: int = opt(0, "--split-max-size", "custom", form="SIZE", example="--split-max-size 2G",
        parse=parse_size, help="bytes of tensors per file at most (2G or 2GiB is 2^31 bytes, 2GB is 2*10^9)")
    split_max_tensors: int = opt(0, "--split-max-tensors", "int", form="N", example="--split-max-tensors 128",
        minimum=0, help="most tensors per file; 0 = no limit")
    resume: bool = opt(False, "--resume --partial-requant", "switch",
        help="continue after an interruption: skip complete files of a split result (a single file always continues)")
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", form="KEY=TYPE:VALUE",
        example="--override-kv general.name=str:mine", parse=parse_text_item, repeat=True,
        help="change a metadata key; TYPE int, float, bool or str (repeatable)")
    dry_run: bool = opt(False, "--dry-run", "switch",
        help="print the type and size of every tensor and the total, write nothing")
    n_threads: str | None = opt(None, "-t --threads", "str", form="N", example="-t 8",
        help="threads; auto = physical cores")
    json: bool = opt(False, "--json", "switch", help="print files, types and sizes as JSON")
    verbose: bool = opt(False, "-v --verbose", "switch",
        help="also print which rule decided, and which tensors were left out")
    print_supported_models: bool = opt(False, "--print-supported-models", "switch",
        help="list the classes of models that can be converted, with the architecture of their files, and stop")
    remote: bool = opt(False, "--remote", "switch", help="not supported; download the model with ik pull first")
    no_lazy: bool = opt(False, "--no-lazy", "switch", help="accepted; tensors are always read piece by piece")
    use_temp_file: bool = opt(False, "--use-temp-file", "switch", help="accepted; memory is bounded anyway")


@dataclass(frozen=True, slots=True)
class QuantizeStatsConfig:
    """quantize-stats: error of tensor types on the tensors of a model."""

    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model.gguf",
        help="model to measure; default the bundled demo model")
    types: tuple[str, ...] = opt((), "--type --types", "custom", form="TYPE[,TYPE...]", example="--type q4_K,iq4_k",
        parse=parse_text_item, repeat=True, help="tensor types to measure, or all (the default) (repeatable)")
    imatrix: str | None = opt(None, "--imatrix", "str", form="FILE", example="--imatrix imatrix.dat",
        help="importance matrix: used by the encoders and for the column `weighted`")
    include: tuple[str, ...] = opt((), "-l --include --include-layer", "custom", form="RE", example="-l attn",
        parse=parse_text_item, repeat=True, help="measure only tensors whose name matches (repeatable)")
    exclude: tuple[str, ...] = opt((), "-L --exclude --exclude-layer", "custom", form="RE", example="-L exps",
        parse=parse_text_item, repeat=True, help="leave out tensors whose name matches (repeatable)")
    rows: int = opt(256, "--rows", "int", form="N", example="--rows 1024", minimum=0,
        help="rows measured per tensor, spread evenly; 0 = all")
    summary: bool = opt(False, "--summary", "switch", help="print only the rows over all tensors")
    output_format: str = opt("md", "--output-format", "choice", form="md|jsonl", example="--output-format jsonl",
        choices=("md", "jsonl"), help="output format; jsonl has the full counts of scales and codes")
    n_threads: int = opt(0, "-t --threads", "custom", form="N", example="-t 8", parse=parse_threads,
        help="threads; auto = physical cores")
    fleet: BatchConfig = group(BatchConfig)
    hub: HubConfig = group(HubConfig)


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """study: the cost of each tensor in each type."""

    model: str | None = opt(None, "-m --model", "str", form="FILE", example="-m model-f16.gguf",
        help="model to measure, f16 or bf16 for exact results; default the bundled demo model")
    file: str | None = opt(None, "-f --file", "str", form="FILE", example="-f wiki.test.raw",
        help="text to measure on; default the bundled text")
    types: tuple[str, ...] = opt((), "--types --type", "custom", form="TYPE[,TYPE...]",
        example="--types iq3_k,iq4_k,q6_K", parse=parse_text_item, repeat=True,
        help="tensor types to measure (default iq2_k,iq3_k,iq4_k,iq6_k)")
    tensors: tuple[str, ...] = opt((), "-l --tensors --include", "custom", form="RE", example="--tensors ffn_down",
        parse=parse_text_item, repeat=True, help="measure only tensors whose name matches (repeatable)")
    exclude: tuple[str, ...] = opt((), "-L --exclude", "custom", form="RE", example="--exclude token_embd",
        parse=parse_text_item, repeat=True, help="leave out tensors whose name matches (repeatable)")
    by: str = opt("tensor", "--by", "choice", form="tensor|role|block", example="--by role",
        choices=("tensor", "role", "block"),
        help="unit to quantize: one tensor (up and gate experts together), the tensors of one name in all blocks, or "
        "all tensors of a block")
    imatrix: str | None = opt(None, "--imatrix", "str", form="FILE", example="--imatrix imatrix.dat",
        help="importance matrix for the encoders")
    chunks: int = opt(16, "--chunks", "int", form="N", example="--chunks 32", minimum=-1,
        help="most chunks of the text to use; -1 = all")
    n_ctx: int = opt(512, "-c --ctx-size", "int", form="N", example="-c 512", minimum=16, help="tokens of a chunk")
    precision: float = opt(0.05, "--precision", "float", form="F", example="--precision 0.02",
        help="end a measurement when its standard error is this share of the divergence; 0 = after all chunks")
    journal: str | None = opt(None, "-o --journal", "str", form="FILE", example="-o study.jsonl",
        help="keep every result in FILE; a run that ended early continues from there")
    show: str | None = opt(None, "--show", "str", form="FILE", example="--show study.jsonl",
        help="measure nothing, print the table of a journal")
    plot: str | None = opt(None, "--plot", "str", form="FILE", example="--plot study.png",
        help="draw the results into FILE (.png, .svg, .pdf)")
    json: bool = opt(False, "--json", "switch", help="machine-readable output")
    fleet: FleetConfig = group(FleetConfig)
    prefix_mib: int = opt(2048, "--prefix-memory", "int", form="MiB", example="--prefix-memory 8192", minimum=0,
        help="MiB for intermediate values of layers, so that a change is computed only from its layer on")
    override_kv: tuple[str, ...] = opt((), "--override-kv", "custom", form="KEY=TYPE:VALUE",
        example="--override-kv deepseek2.expert_used_count=int:6", parse=parse_text_item, repeat=True,
        help="change a metadata key; TYPE int, float, bool or str (repeatable)")
    n_threads: int = opt(0, "-t --threads", "custom", form="N", example="-t 8", parse=parse_threads,
        help="threads of all workers together, or on a cluster of each worker; auto = physical cores")
    hub: HubConfig = group(HubConfig)
