"""Options of perplexity and imatrix."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt

# One partial per topic, with the values that its options share.
_imatrix = partial(opt, topic="imatrix", commands="I")
_perplexity = partial(opt, topic="perplexity", commands="P")


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """perplexity: perplexity of a text, and its KL divergence from stored predictions."""

    chunks: int = _perplexity(-1, "--chunks", "int", commands="PI", form="N", example="--chunks 8", minimum=-1,
        help="number of chunks to evaluate; -1 = all")
    stride: int = _perplexity(0, "--ppl-stride", "int", form="N", example="--ppl-stride 256",
        help="step between windows; 0 = plain chunks")
    output_type: int = _perplexity(0, "--ppl-output-type", "choice", form="0|1", example="--ppl-output-type 1",
        choices=("0", "1"), help="0: running values on one line; 1: one line per chunk")
    logits_file: Path | None = _perplexity(None, "--kl-divergence-base --save-all-logits", "path", form="FILE",
        example="--kl-divergence-base base.logits",
        help="file of reference logits: written, or read with --kl-divergence")
    kl_divergence: bool = _perplexity(False, "--kl-divergence", "switch", example="--kl-divergence",
        help="compare with the logits of --kl-divergence-base")
    moe_trace: Path | None = _perplexity(None, "--moe-trace", "path", form="FILE", example="--moe-trace experts.npz",
        help="record which experts every token uses; benchmarks/expert_cache.py replays the file")
    mtp: bool = _perplexity(False, "--mtp", "switch", example="--mtp",
        help="also print perplexity and accepted share of each layer that predicts further tokens (MTP), of the model "
        "or of -md FILE")
    hellaswag: bool = _perplexity(False, "--hellaswag", "switch", example="--hellaswag",
        help="HellaSwag score of the tasks in -f FILE: six lines each (context, index of the right ending, four "
        "endings)")
    hellaswag_tasks: int = _perplexity(400, "--hellaswag-tasks", "int", form="N", example="--hellaswag-tasks 1000",
        minimum=1, help="number of HellaSwag tasks to use")
    winogrande: bool = _perplexity(False, "--winogrande", "switch", example="--winogrande",
        help="Winogrande score of the tasks in -f FILE: CSV of index, sentence with _, two choices, answer (1 or 2)")
    winogrande_tasks: int = _perplexity(0, "--winogrande-tasks", "int", form="N", example="--winogrande-tasks 500",
        minimum=0, help="number of Winogrande tasks to use; 0 = all")
    multiple_choice: bool = _perplexity(False, "--multiple-choice", "switch", example="--multiple-choice",
        help="share of correct answers to the multiple-choice tasks in -f FILE (binary, as made for llama.cpp: ARC, "
        "MMLU, TruthfulQA)")
    multiple_choice_tasks: int = _perplexity(0, "--multiple-choice-tasks", "int", form="N",
        example="--multiple-choice-tasks 500", minimum=0, help="number of multiple-choice tasks to use; 0 = all")
    fail_on_nan: bool = _perplexity(True, "--fail-on-nan", "switch", negative="--no-fail-on-nan",
        example="--fail-on-nan", help="stop at the first chunk that is not finite")

    @property
    def scores_choices(self) -> bool:
        """Whether choices are scored instead of a text."""
        return self.hellaswag or self.winogrande or self.multiple_choice


@dataclass(frozen=True, slots=True)
class ImatrixConfig:
    """imatrix: importance of weight columns, measured on a text."""

    output: Path = _imatrix(Path("imatrix.dat"), "-o --output --output-file", "path", form="FILE",
        example="-o imatrix.dat", help="file to write")
    output_frequency: int = _imatrix(10, "-ofreq --output-frequency", "int", form="N", example="-ofreq 10", minimum=1,
        help="write the file every N chunks")
    save_frequency: int = _imatrix(0, "--save-frequency", "int", form="N", example="--save-frequency 50",
        help="keep a copy every N chunks; 0 = never")
    process_output: bool = _imatrix(False, "--process-output", "switch", example="--process-output",
        help="also measure the output tensor")
    output_tensor_name: str = _imatrix("output.weight", "--output-tensor-name", "str", form="NAME",
        example="--output-tensor-name output.weight", help="name of the output tensor")
    ppl: bool = _imatrix(True, "--ppl", "switch", negative="--no-ppl", example="--no-ppl",
        help="also compute perplexity")
    from_chunk: int = _imatrix(0, "--chunk --from-chunk", "int", form="N", example="--from-chunk 10", minimum=0,
        help="first chunk to use")
    layer_similarity: bool = _imatrix(False, "-lsim --layer-similarity", "switch", example="-lsim",
        help="report how similar the input and output of layers are")
    hide_imatrix: bool = _imatrix(False, "--hide-imatrix", "switch", example="--hide-imatrix",
        help="do not store file and data set names")
    in_file: tuple[Path, ...] = _imatrix((), "--in-file", "custom", form="FILE", example="--in-file part.dat",
        parse=lambda text: (Path(text),), repeat=True, bench_list=False,
        help="importance matrix to continue from; several are merged, and without -f or -p nothing else is done. "
        "Any other file is taken as the text")
    output_format: str = _imatrix("auto", "--output-format", "choice", form="auto|dat|gguf",
        example="--output-format gguf", choices=("auto", "dat", "gguf"),
        help="format of the file; auto: gguf if its name ends in .gguf")
    covariance: Path | None = _imatrix(None, "--covariance", "path", form="FILE",
        example="--covariance covariance.gguf",
        help="also write second moments of all inputs, for ik quantize --covariance; GGUF")
    mtp: bool = _imatrix(True, "--mtp", "switch", negative="--no-mtp", example="--no-mtp",
        help="also measure the layers that predict further tokens (MTP), where ik runs them")
    random_tokens: int = _imatrix(0, "--random-tokens", "int", form="N", example="--random-tokens 16384", minimum=0,
        help="use N tokens drawn uniformly from the vocabulary instead of a text: nearly as good for "
        "--covariance; mean squares are better with a text")
    covariance_limit: int = _imatrix(512, "--covariance-limit", "int", form="MIB", example="--covariance-limit 2048",
        minimum=1,
        help="MiB per input (of all experts of a layer); larger inputs are measured in blocks of columns")
    show_statistics: bool = _imatrix(False, "--show-statistics", "switch", example="--show-statistics",
        help="print a table about the importance matrices of --in-file and stop")
    compare: bool = _imatrix(False, "--compare", "switch", example="--compare",
        help="compare the two importance matrices of --in-file tensor by tensor, worst first, and stop")
