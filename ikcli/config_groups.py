"""Options that belong to a few commands only, grouped: prompt, chat, sampling, server, benchmarks, perplexity, imatrix.

The last group holds tuning flags of the C++ programs that need no counterpart here: accepted, with a notice.
"""

# ruff: noqa: E501, RUF009  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ikcli.config_values import (
    ScaledFile,
    SpecSetting,
    SpecStage,
    parse_int_list,
    parse_layer_range,
    parse_layers,
    parse_pairs,
    parse_path_item,
    parse_scaled_file,
    parse_spec_setting,
    parse_spec_type,
    parse_text_item,
    parse_thread_pairs,
)
from ikcli.options import opt


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Text to start from (chat, perplexity, imatrix)."""

    prompt: str = opt("", "-p --prompt", "str", "the prompt", topic="prompt", commands="CPIE", form="TEXT", example='-p "Once upon a time"', text=True)
    file: Path | None = opt(None, "-f --file", "path", "read the text from a file; one that gzip, bzip2 or xz compressed is unpacked", topic="prompt", commands="CPIE", form="FILE", example="-f wiki.test.raw")
    binary_file: Path | None = opt(None, "-bf --binary-file", "path", "as -f, but the file is taken as it is: no escapes, and no line end is dropped", topic="prompt", commands="P", form="FILE", example="-bf arc-easy-validation.bin")
    escape: bool = opt(True, "-e --escape", "switch", "interpret \\n, \\t and so on in the prompt", topic="prompt", commands="CPIE", negative="--no-escape", example="-e")
    parse_special: bool = opt(False, "--parse-special", "switch", "names of control tokens in the text, as those of a chat template, are these tokens", topic="prompt", commands="PI", example="--parse-special")
    reverse_prompt: tuple[str, ...] = opt((), "-r --reverse-prompt", "custom", "stop generation at this text (chat: and ask for input); repeatable", topic="prompt", commands="CS", form="TEXT", example='-r "User:"', parse=parse_text_item, repeat=True, text=True)
    keep: int = opt(0, "--keep", "int", "prompt tokens to keep when the context is full; -1 = all", topic="prompt", commands="CS", form="N", example="--keep 32")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """chat: how a text is continued or a conversation is held in a terminal."""

    conversation: bool | None = opt(None, "-cnv --conversation", "switch", "answer turn by turn with the chat template. Default: in a terminal, if the model has a template and there is no prompt", topic="chat", commands="C", negative="-no-cnv --no-conversation", example="-cnv")
    single_turn: bool = opt(False, "-st --single-turn", "switch", "answer the prompt as the only turn of a conversation, then stop", topic="chat", commands="C", example="-st")
    system: str = opt("", "-sys --system-prompt", "str", "what a conversation begins with: how the model is to behave", topic="chat", commands="C", form="TEXT", example='-sys "Answer in rhymes."', text=True)
    system_file: Path | None = opt(None, "-sysf --system-prompt-file -spf", "path", "file with the system prompt", topic="chat", commands="C", form="FILE", example="-sysf system.txt")
    url: str = opt("", "--url", "str", "talk to this running server instead of loading a model", topic="chat", commands="C", form="URL", example="--url http://127.0.0.1:8080")
    interactive: bool = opt(False, "-i --interactive", "switch", "without a template: ask for input when generation stops", topic="chat", commands="C", example="-i")
    interactive_first: bool = opt(False, "-if --interactive-first", "switch", "as -i, but ask for input right away", topic="chat", commands="C", example="-if")
    in_prefix: str = opt("", "--in-prefix", "str", "text put before every input of -i", topic="chat", commands="C", form="TEXT", example='--in-prefix " "', text=True)
    in_suffix: str = opt("", "--in-suffix", "str", "text put after every input of -i", topic="chat", commands="C", form="TEXT", example='--in-suffix "Bot:"', text=True)
    in_prefix_bos: bool = opt(False, "--in-prefix-bos", "switch", "begin every input of -i with the BOS token", topic="chat", commands="C", example="--in-prefix-bos")
    multiline: bool = opt(False, "-mli --multiline-input", "switch", "Enter begins a new line, Alt-Enter sends (without a line editor: a line that ends with / sends)", topic="chat", commands="C", example="-mli")
    special: bool = opt(False, "-sp --special", "switch", "show control tokens in the text; a server sends them, too", topic="chat", commands="SC", example="-sp")
    display_prompt: bool = opt(True, "--display-prompt", "switch", "print the prompt before the text that continues it", topic="chat", commands="C", negative="--no-display-prompt", example="--no-display-prompt")
    verbose_prompt: bool = opt(False, "--verbose-prompt", "switch", "list the tokens of the prompt", topic="chat", commands="C", example="--verbose-prompt")
    color: bool | None = opt(None, "-co --color", "optswitch", "colours and Markdown. Default: in a terminal", topic="chat", commands="C", negative="--no-color", example="--color off")
    simple_io: bool = opt(False, "--simple-io", "switch", "plain lines in and out, without line editor, colours and Markdown", topic="chat", commands="C", example="--simple-io")
    prompt_cache: Path | None = opt(None, "--prompt-cache", "path", "file that keeps what was computed of the prompt: read at the start if it is there, written when the prompt is computed", topic="chat", commands="C", form="FILE", example="--prompt-cache prompt.bin")
    prompt_cache_all: bool = opt(False, "--prompt-cache-all", "switch", "write the file at the end, with inputs and answers", topic="chat", commands="C", example="--prompt-cache-all")
    prompt_cache_ro: bool = opt(False, "--prompt-cache-ro", "switch", "never write the file", topic="chat", commands="C", example="--prompt-cache-ro")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Low-rank adapters and control vectors, added while the model runs."""

    lora: tuple[Path, ...] = opt((), "--lora", "custom", "low-rank adapter (GGUF) to apply; repeatable", topic="model", form="FILE[,FILE...]", example="--lora adapter.gguf", parse=parse_path_item, repeat=True, bench_list=False)
    lora_scaled: tuple[ScaledFile, ...] = opt((), "--lora-scaled", "custom", "low-rank adapter to apply with a scale of its own; repeatable, numbered after those of --lora", topic="model", form="FILE SCALE", example="--lora-scaled adapter.gguf 0.5", parse=parse_scaled_file, repeat=True, bench_list=False, n_values=2)
    lora_init_without_apply: bool = opt(False, "--lora-init-without-apply", "switch", "load adapters with scale 0; requests and POST /lora-adapters set another", topic="model", commands="S", example="--lora-init-without-apply")
    control_vector: tuple[Path, ...] = opt((), "--control-vector", "custom", "control vector (GGUF) to add to the outputs of layers; repeatable", topic="model", form="FILE", example="--control-vector happy.gguf", parse=parse_path_item, repeat=True, bench_list=False)
    control_vector_scaled: tuple[ScaledFile, ...] = opt((), "--control-vector-scaled", "custom", "control vector with a scale; repeatable", topic="model", form="FILE SCALE", example="--control-vector-scaled happy.gguf 0.8", parse=parse_scaled_file, repeat=True, bench_list=False, n_values=2)
    control_vector_path: Path | None = opt(None, "--control-vector-path", "path", "folder of control vectors that POST /control-vectors/load may load while the server runs", topic="model", commands="S", form="DIR", example="--control-vector-path vectors")
    control_vector_layer_range: tuple[int, int] | None = opt(None, "--control-vector-layer-range", "custom", "first and last layer that control vectors change; default all", topic="model", form="FIRST LAST", example="--control-vector-layer-range 10 20", parse=parse_layer_range, bench_list=False, n_values=2)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding other than the model file says."""

    scaling: str = opt("", "--rope-scaling", "choice", "how rotation frequencies are scaled: none, linear, or yarn; default as in the model file", topic="context", form="none|linear|yarn", example="--rope-scaling yarn", choices=("none", "linear", "yarn"), env="LLAMA_ARG_ROPE_SCALING_TYPE")
    scale: float = opt(0.0, "--rope-scale", "float", "factor by which the context is extended; 0 = as in the model file", topic="context", form="F", example="--rope-scale 4", minimum=0, env="LLAMA_ARG_ROPE_SCALE")
    freq_scale: float = opt(0.0, "--rope-freq-scale", "float", "frequencies are multiplied by this: 1/N is --rope-scale N", topic="context", form="F", example="--rope-freq-scale 0.25", minimum=0, env="LLAMA_ARG_ROPE_FREQ_SCALE")
    freq_base: float = opt(0.0, "--rope-freq-base", "float", "base of the frequencies (NTK-aware scaling); 0 = as in the model file", topic="context", form="F", example="--rope-freq-base 1000000", minimum=0, env="LLAMA_ARG_ROPE_FREQ_BASE")
    orig_ctx: int = opt(0, "--yarn-orig-ctx", "int", "YaRN: context the model was trained with before its extension; 0 = as in the model file", topic="context", form="N", example="--yarn-orig-ctx 32768", minimum=0, env="LLAMA_ARG_YARN_ORIG_CTX")
    ext_factor: float = opt(-1.0, "--yarn-ext-factor", "float", "YaRN: share of the original frequencies where they are kept; 0 = interpolation only, below 0 = 1 with --rope-scaling yarn, else 0", topic="context", form="F", example="--yarn-ext-factor 1", env="LLAMA_ARG_YARN_EXT_FACTOR")
    attn_factor: float = opt(-1.0, "--yarn-attn-factor", "float", "YaRN: factor on the magnitude of rotated heads, beside that of the model file; below 0 = none", topic="context", form="F", example="--yarn-attn-factor 1", env="LLAMA_ARG_YARN_ATTN_FACTOR")
    beta_slow: float = opt(-1.0, "--yarn-beta-slow", "float", "YaRN: frequencies with fewer rotations over the original context are interpolated; below 0 = as in the model file", topic="context", form="F", example="--yarn-beta-slow 1", env="LLAMA_ARG_YARN_BETA_SLOW")
    beta_fast: float = opt(-1.0, "--yarn-beta-fast", "float", "YaRN: frequencies with more rotations over the original context are kept; below 0 = as in the model file", topic="context", form="F", example="--yarn-beta-fast 32", env="LLAMA_ARG_YARN_BETA_FAST")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the next token is chosen (serve, chat)."""

    temp: float = opt(0.8, "--temp --temperature", "float", "temperature; 0 = always the most likely token", topic="sampling", commands="SC", form="T", example="--temp 0.6", minimum=0, env="LLAMA_ARG_TEMPERATURE")
    top_k: int = opt(40, "--top-k", "int", "keep the K most likely tokens; 0 or less = all", topic="sampling", commands="SC", form="K", example="--top-k 40", env="LLAMA_ARG_TOP_K")
    top_p: float = opt(0.95, "--top-p", "float", "keep the most likely tokens up to this total probability", topic="sampling", commands="SC", form="P", example="--top-p 0.95", env="LLAMA_ARG_TOP_P")
    min_p: float = opt(0.05, "--min-p", "float", "drop tokens below this share of the best one", topic="sampling", commands="SC", form="P", example="--min-p 0.05", env="LLAMA_ARG_MIN_P")
    tfs: float = opt(1.0, "--tfs", "float", "tail free sampling; 1 = off", topic="sampling", commands="SC", form="Z", example="--tfs 1")
    typical: float = opt(1.0, "--typical --typical-p", "float", "locally typical sampling; 1 = off", topic="sampling", commands="SC", form="P", example="--typical 1")
    repeat_penalty: float = opt(1.0, "--repeat-penalty", "float", "penalty for repeated tokens; 1 = off", topic="sampling", commands="SC", form="R", example="--repeat-penalty 1.1", env="LLAMA_ARG_REPEAT_PENALTY")
    repeat_last_n: int = opt(64, "--repeat-last-n", "int", "tokens looked back at for penalties; -1 = whole context", topic="sampling", commands="SC", form="N", example="--repeat-last-n 64")
    frequency_penalty: float = opt(0.0, "--frequency-penalty", "float", "penalty per earlier occurrence; 0 = off", topic="sampling", commands="SC", form="F", example="--frequency-penalty 0.1", env="LLAMA_ARG_FREQUENCY_PENALTY")
    presence_penalty: float = opt(0.0, "--presence-penalty", "float", "penalty for having occurred; 0 = off", topic="sampling", commands="SC", form="F", example="--presence-penalty 0.1", env="LLAMA_ARG_PRESENCE_PENALTY")
    top_n_sigma: float = opt(-1.0, "--top-n-sigma --top-nsigma", "float", "keep tokens within N standard deviations of the best logit; below 0 = off", topic="sampling", commands="SC", form="N", example="--top-n-sigma 1")
    dynatemp_range: float = opt(0.0, "--dynatemp-range", "float", "temperature varies by this much with the entropy; 0 = off", topic="sampling", commands="SC", form="R", example="--dynatemp-range 0.5", minimum=0)
    dynatemp_exponent: float = opt(1.0, "--dynatemp-exp", "float", "exponent of the dynamic temperature", topic="sampling", commands="SC", form="E", example="--dynatemp-exp 1")
    xtc_probability: float = opt(0.0, "--xtc-probability", "float", "probability of leaving out the most likely tokens; 0 = off", topic="sampling", commands="SC", form="P", example="--xtc-probability 0.5")
    xtc_threshold: float = opt(0.1, "--xtc-threshold", "float", "tokens at least this likely may be left out; above 0.5 = off", topic="sampling", commands="SC", form="P", example="--xtc-threshold 0.1")
    mirostat: int = opt(0, "--mirostat", "choice", "mirostat sampling: 0 off, 1, or 2", topic="sampling", commands="SC", form="0|1|2", example="--mirostat 2", choices=("0", "1", "2"))
    mirostat_eta: float = opt(0.1, "--mirostat-lr", "float", "learning rate of mirostat", topic="sampling", commands="SC", form="ETA", example="--mirostat-lr 0.1")
    mirostat_tau: float = opt(5.0, "--mirostat-ent", "float", "target entropy of mirostat", topic="sampling", commands="SC", form="TAU", example="--mirostat-ent 5")
    dry_multiplier: float = opt(0.0, "--dry-multiplier", "float", "strength of the penalty for repeating sequences (DRY); 0 = off", topic="sampling", commands="SC", form="F", example="--dry-multiplier 0.8")
    dry_base: float = opt(1.75, "--dry-base", "float", "growth of the DRY penalty with the length of the repetition", topic="sampling", commands="SC", form="F", example="--dry-base 1.75")
    dry_allowed_length: int = opt(2, "--dry-allowed-length", "int", "longest repetition without DRY penalty", topic="sampling", commands="SC", form="N", example="--dry-allowed-length 2")
    dry_penalty_last_n: int = opt(-1, "--dry-penalty-last-n", "int", "tokens DRY looks back at; 0 = off, -1 = whole context", topic="sampling", commands="SC", form="N", example="--dry-penalty-last-n 1024", minimum=-1)
    dry_sequence_breakers: tuple[str, ...] = opt((), "--dry-sequence-breaker", "custom", "text over which DRY sees no repetition, instead of the usual ones; none = no such text; repeatable", topic="sampling", commands="SC", form="TEXT", example='--dry-sequence-breaker ";"', parse=parse_text_item, repeat=True)
    adaptive_target: float = opt(-1.0, "--adaptive-target", "float", "prefer tokens near this probability; below 0 = off", topic="sampling", commands="SC", form="P", example="--adaptive-target 0.5")
    adaptive_decay: float = opt(0.9, "--adaptive-decay", "float", "how slowly the adaptive target follows, 0 to 0.99", topic="sampling", commands="SC", form="D", example="--adaptive-decay 0.9", minimum=0)
    penalize_nl: bool = opt(False, "--penalize-nl", "switch", "repetition penalties also apply to line ends", topic="sampling", commands="SC", example="--penalize-nl")
    logit_bias: tuple[str, ...] = opt((), "-l --logit-bias", "custom", "add to the logit of a token; repeatable", topic="sampling", commands="SC", form="ID+BIAS", example="-l 15043+1", parse=parse_text_item, repeat=True)
    grammar: str = opt("", "--grammar", "str", "GBNF grammar that answers must follow", topic="sampling", commands="SC", form="GBNF", example="--grammar 'root ::= \"yes\" | \"no\"'")
    grammar_file: Path | None = opt(None, "--grammar-file", "path", "file with the grammar", topic="sampling", commands="SC", form="FILE", example="--grammar-file list.gbnf")
    json_schema: str = opt("", "-j --json-schema", "str", "JSON schema that answers must follow", topic="sampling", commands="SC", form="JSON", example="-j '{}'")
    json_schema_file: Path | None = opt(None, "-jf --json-schema-file", "path", "file with the JSON schema", topic="sampling", commands="SC", form="FILE", example="-jf answer.schema.json")
    samplers: str = opt("", "--samplers", "str", "samplers in order, separated by ;", topic="sampling", commands="SC", form="LIST", example='--samplers "top_k;top_p;temperature"')
    sampler_seq: str = opt("", "--sampling-seq --sampler-seq", "str", "samplers in order, one letter each", topic="sampling", commands="SC", form="LETTERS", example="--sampling-seq edskypmxt")
    ignore_eos: bool = opt(False, "--ignore-eos", "switch", "go on after the end-of-text token", topic="sampling", commands="SC", example="--ignore-eos")
    lookup_cache_dynamic: Path | None = opt(None, "-lcd --lookup-cache-dynamic", "path", "n-gram file for lookup decoding, updated while running; not a KV cache dump (see --slot-save-path)", topic="sampling", commands="SC", form="FILE", example="-lcd ngrams.bin")
    lookup_cache_static: Path | None = opt(None, "-lcs --lookup-cache-static", "path", "n-gram file for lookup decoding, read only", topic="sampling", commands="SC", form="FILE", example="-lcs ngrams.bin")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    alias: str = opt("", "-a --alias", "str", "model name in the API, or several, separated by commas; default the file name", topic="server", commands="S", form="NAME[,NAME...]", example="-a my-model", env="LLAMA_ARG_MODEL_ALIAS LLAMA_ARG_ALIAS")
    host: str = opt("127.0.0.1", "--host", "str", "address to listen on: a name or number, a path that ends in .sock, or fd:N, a listening socket that the program was started with; several separated by commas (:: is then IPv6 alone)", topic="server", commands="S", form="ADDR[,ADDR...]", example="--host 0.0.0.0", env="LLAMA_ARG_HOST")
    port: int = opt(8080, "--port", "int", "port to listen on", topic="server", commands="S", form="N", example="--port 8080", minimum=0, env="LLAMA_ARG_PORT")
    api_key: str = opt("", "--api-key", "str", "key that requests must carry, several separated by commas or repeated; in chat the key that is sent to the server of --url", topic="server", commands="SC", form="KEY", example="--api-key secret", env="LLAMA_API_KEY", joined="S")
    api_key_file: Path | None = opt(None, "--api-key-file", "path", "file with one key per line", topic="server", commands="S", form="FILE", example="--api-key-file keys.txt", env="LLAMA_ARG_API_KEY_FILE")
    keys: Path | None = opt(None, "--keys", "path", "TOML file of users with a key each, and their limits (docs/serve.md)", topic="server", commands="S", form="FILE", example="--keys keys.toml")
    models: Path | None = opt(None, "--models", "path", "serve the models of a TOML file behind one port; each is loaded when a request asks for it (docs/serve-models.md)", topic="server", commands="S", form="FILE", example="--models models.toml")
    models_preset: Path | None = opt(None, "--models-preset", "path", "as --models, of a preset file of llama.cpp: INI, a section per model (docs/serve-models.md)", topic="server", commands="S", form="FILE", example="--models-preset presets.ini", env="LLAMA_ARG_MODELS_PRESET")
    models_dir: Path | None = opt(None, "--models-dir", "path", "serve the GGUF files of a folder behind one port, each by its name without .gguf", topic="server", commands="S", form="DIR", example="--models-dir models", env="LLAMA_ARG_MODELS_DIR")
    models_cache: bool | None = opt(None, "--models-cache", "switch", "serve the downloaded models of the hub's cache behind one port, each as user/repo:quant; with it POST /models downloads more. Default: with --models-dir and --models-preset", topic="server", commands="S", negative="--no-models-cache", example="--models-cache")
    models_max: int | None = opt(None, "--models-max", "int", "models that are loaded at a time, the least recently used one goes; 0 = as many as fit into memory. Default: 4, with --models 0", topic="server", commands="S", form="N", example="--models-max 2", minimum=0, env="LLAMA_ARG_MODELS_MAX")
    models_autoload: bool = opt(True, "--models-autoload", "switch", "load a model when a request asks for it; a request's ?autoload=true or false overrides it", topic="server", commands="S", negative="--no-models-autoload", example="--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD")
    sleep_idle_seconds: int = opt(-1, "--sleep-idle-seconds", "int", "give the memory of a model back after so many seconds without a request; the next one loads it again. -1 or 0 = never", topic="server", commands="S", form="S", example="--sleep-idle-seconds 600", minimum=-1)
    replicas: int = opt(1, "--replicas", "int", "serve the model by so many processes behind one port: on this machine, where they share processors and what -t says, or on Ray (--ray). A request goes where its beginning was computed (docs/fleet.md)", topic="server", commands="S", form="N", example="--replicas 4", minimum=1)
    replica_gpus: int = opt(0, "--replica-gpus", "int", "GPUs of each replica: dealt out on this machine, reserved on Ray; 0 = every replica sees all", topic="server", commands="S", form="N", example="--replica-gpus 1", minimum=0)
    timeout: int = opt(600, "-to --timeout", "int", "read and write timeout in seconds", topic="server", commands="S", form="S", example="--timeout 600", minimum=0, env="LLAMA_ARG_TIMEOUT")
    threads_http: int = opt(-1, "--threads-http", "int", "threads for HTTP requests; -1 = CPUs - 1", topic="server", commands="S", form="N", example="--threads-http 4", env="LLAMA_ARG_THREADS_HTTP")
    metrics: bool = opt(False, "--metrics", "switch", "serve /metrics", topic="server", commands="S", example="--metrics", env="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = opt(True, "--slots", "switch", "serve /slots", topic="server", commands="S", negative="--no-slots", example="--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS")
    path: Path | None = opt(None, "--path", "path", "folder of static files to serve", topic="server", commands="S", form="DIR", example="--path public", env="LLAMA_ARG_STATIC_PATH")
    log_format: str = opt("text", "--log-format", "choice", "format of the server log", topic="server", commands="S", form="text|json", example="--log-format json", choices=("text", "json"))
    first_slot: int = opt(0, "--first-slot", "int", "number of the first slot in requests and answers; servers behind one port have different ones", topic="server", commands="S", form="N", example="--first-slot 4", minimum=0)
    slot_save_path: Path | None = opt(None, "--slot-save-path", "path", "folder for saved slots", topic="server", commands="S", form="DIR", example="--slot-save-path slots", env="LLAMA_ARG_SLOT_SAVE_PATH")
    sessions: Path | None = opt(None, "--sessions", "path", "keep conversations in this folder, so that they go on after a restart without being computed again", topic="server", commands="S", form="DIR", example="--sessions sessions")
    sessions_limit: int = opt(8192, "--sessions-limit", "int", "MiB that the folder of --sessions may hold; what was not used for longest goes first", topic="server", commands="S", form="MIB", example="--sessions-limit 20000", minimum=1)
    slot_prompt_similarity: float = opt(0.5, "-sps --slot-prompt-similarity", "float", "how much of a prompt must match to reuse a slot; 0 = off", topic="server", commands="S", form="F", example="-sps 0.5")
    ctx_checkpoints: int = opt(32, "-ctx-ckpt --ctx-checkpoints -ctxcp --swa-checkpoints", "int", "checkpoints kept per slot, to go back to when the end of a prompt changes; for models with windows or recurrent layers, others can go back anywhere. 0 = none", topic="server", commands="SC", form="N", example="-ctx-ckpt 16", minimum=0, env="LLAMA_ARG_CTX_CHECKPOINTS")
    ctx_checkpoints_interval: int = opt(512, "-ctx-ckpt-i --ctx-checkpoints-interval -cpent --checkpoint-every-n-tokens -cms --checkpoint-min-step", "int", "tokens of a prompt between two checkpoints; 0 = only at turns and at the end", topic="server", commands="SC", form="N", example="-ctx-ckpt-i 1024")
    ctx_checkpoints_tolerance: int = opt(5, "-ctx-ckpt-t --ctx-checkpoints-tolerance", "int", "tokens before the end of a prompt where a checkpoint is made; 0 = none", topic="server", commands="SC", form="N", example="-ctx-ckpt-t 8")
    ctx_checkpoints_eviction: str = opt("auto", "-ctx-ckpt-e --ctx-checkpoints-eviction", "choice", "which checkpoint goes when there are too many: the oldest (fifo), or the one that leaves the smallest gap (variance)", topic="server", commands="SC", form="NAME", example="-ctx-ckpt-e fifo", choices=("auto", "variance", "fifo"))
    cache_ram: int | None = opt(None, "-cram --cache-ram", "int", "RAM for prompts that had to leave their slot; 0 = off, -1 = no limit. Default: a quarter of the free memory, at most 8192", topic="server", commands="SC", form="MIB", example="-cram 2048", minimum=-1, env="LLAMA_ARG_CACHE_RAM")
    spec_type: tuple[SpecStage, ...] = opt((), "--spec-type", "custom", "who guesses tokens ahead, with keys n_max, n_min, p_min, ngram_size_n, ngram_size_m, ngram_min_hits; the text stays the same. Repeatable: later ones are asked when earlier ones have no guess", topic="speculation", commands="SC", form="TYPE[:K=V,...]", example="--spec-type ngram-simple:n_max=7", parse=parse_spec_type, repeat=True, bench_list=False, env="LLAMA_ARG_SPEC_TYPE")
    spec_set: tuple[SpecSetting, ...] = opt((), "--spec-set", "custom", "setting of a --spec-type that does not name it; ngram stands for all types of that name. Repeatable", topic="speculation", commands="SC", form="TYPE:K=V", example="--spec-set ngram-mod:n_max=32", parse=parse_spec_setting, repeat=True, bench_list=False)
    model_draft: Path | None = opt(None, "-md --model-draft --spec-draft-model", "path", "small model of the same vocabulary that guesses tokens ahead", topic="speculation", commands="SC", form="FILE", example="-md draft.gguf", bench_list=False, env="LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_MODEL_DRAFT")
    hf_repo_draft: str = opt("", "-hfd -hfrd --hf-repo-draft --spec-draft-hf", "str", "the model of -md from a Hugging Face repository, as -hf", topic="speculation", commands="SC", form="USER/REPO[:QUANT]", example="-hfd user/small:Q8_0", bench_list=False, env="LLAMA_ARG_HFD_REPO LLAMA_ARG_SPEC_DRAFT_HF_REPO")
    draft_max: int = opt(16, "--draft-max --draft --draft-n --spec-draft-n-max", "int", "most tokens guessed at once", topic="speculation", commands="SC", form="N", example="--draft-max 7", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX")
    draft_min: int = opt(0, "--draft-min --draft-n-min --spec-draft-n-min", "int", "fewest tokens a guess must have", topic="speculation", commands="SC", form="N", example="--draft-min 2", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_DRAFT_MIN")
    draft_p_min: float = opt(0.75, "--draft-p-min --spec-draft-p-min", "float", "a draft model stops guessing below this probability", topic="speculation", commands="SC", form="P", example="--draft-p-min 0.5", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_P_MIN")
    draft_ctx: int = opt(0, "-cd --ctx-size-draft", "int", "context of the draft model; 0 = as the model's", topic="speculation", commands="SC", form="N", example="-cd 4096", minimum=0)
    draft_type_k: str = opt("f16", "-ctkd --cache-type-k-draft --spec-draft-type-k", "str", "type of the draft model's K cache", topic="speculation", commands="SC", form="TYPE", example="-ctkd q8_0", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K")
    draft_type_v: str = opt("f16", "-ctvd --cache-type-v-draft --spec-draft-type-v", "str", "type of the draft model's V cache", topic="speculation", commands="SC", form="TYPE", example="-ctvd q8_0", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V")
    draft_gpu_layers: int | None = opt(None, "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", "custom", "blocks of the draft model on the GPU", topic="speculation", commands="SC", form="N|all|auto", example="-ngld 99", parse=parse_layers, env="LLAMA_ARG_N_GPU_LAYERS_DRAFT")
    banned_string_file: Path | None = opt(None, "--banned-string-file", "path", "texts that no answer may contain, one per line; a request's banned_strings replace them", topic="sampling", commands="SC", form="FILE", example="--banned-string-file slop.txt")
    banned_n: int = opt(1, "--banned-n", "int", "tokens of a banned text that are banned where it began; -1 = all, 0 = none", topic="sampling", commands="SC", form="N", example="--banned-n 1", minimum=-1)
    cont_batching: bool = opt(True, "-cb --cont-batching", "switch", "serve several slots in one batch", topic="server", commands="S", negative="-nocb --no-cont-batching", example="-cb", env="LLAMA_ARG_CONT_BATCHING")
    context_shift: bool = opt(True, "--context-shift", "optswitch", "drop old tokens when the context is full", topic="server", commands="SC", negative="--no-context-shift", example="--context-shift off", env="LLAMA_ARG_CONTEXT_SHIFT")
    chat_template: str = opt("", "--chat-template", "str", "chat template to use instead of the one in the model file", topic="server", commands="SC", form="TEXT", example="--chat-template chatml", text=True, env="LLAMA_ARG_CHAT_TEMPLATE")
    chat_template_file: Path | None = opt(None, "--chat-template-file", "path", "file with the chat template", topic="server", commands="SC", form="FILE", example="--chat-template-file chat.jinja", env="LLAMA_ARG_CHAT_TEMPLATE_FILE")
    props: bool = opt(False, "--props", "switch", "allow POST /props", topic="server", commands="S", example="--props", env="LLAMA_ARG_ENDPOINT_PROPS")
    embeddings: bool = opt(False, "--embeddings --embedding", "switch", "only embed: the output matrix is not loaded and nothing is generated. Without it a server does both", topic="server", commands="S", example="--embeddings", env="LLAMA_ARG_EMBEDDINGS")
    reranking: bool = opt(False, "--reranking --rerank", "switch", "only rank documents (a model with a classification head): as --embeddings --pooling rank", topic="server", commands="S", example="--reranking", env="LLAMA_ARG_RERANKING")
    webui: str = opt("auto", "--webui", "str", "web page at /; none = no page", topic="server", commands="S", form="NAME", example="--webui none")
    ui: bool = opt(True, "--ui", "switch", "web page at /", topic="server", commands="S", negative="--no-webui --no-ui", example="--no-webui", env="LLAMA_ARG_UI")
    api_prefix: str = opt("", "--api-prefix", "str", "path in front of all endpoints", topic="server", commands="S", form="PATH", example="--api-prefix /llm", env="LLAMA_ARG_API_PREFIX")
    ssl_key_file: Path | None = opt(None, "--ssl-key-file", "path", "private key (PEM); with --ssl-cert-file the server speaks HTTPS", topic="server", commands="S", form="FILE", example="--ssl-key-file key.pem", env="LLAMA_ARG_SSL_KEY_FILE")
    ssl_cert_file: Path | None = opt(None, "--ssl-cert-file", "path", "certificate (PEM)", topic="server", commands="S", form="FILE", example="--ssl-cert-file cert.pem", env="LLAMA_ARG_SSL_CERT_FILE")
    shutdown_timeout: int = opt(5, "--shutdown-timeout", "int", "seconds that running requests get after SIGTERM; a second signal stops at once", topic="server", commands="S", form="S", example="--shutdown-timeout 30", minimum=0)
    cors_origins: str = opt("*", "--cors-origins", "str", "origins that browsers may call from, separated by commas; localhost = pages of this machine", topic="server", commands="S", form="LIST", example="--cors-origins localhost", env="LLAMA_ARG_CORS_ORIGINS")
    sse_ping_interval: int = opt(30, "--sse-ping-interval", "int", "seconds of silence after which a stream gets a comment; -1 = never", topic="server", commands="S", form="S", example="--sse-ping-interval 10", minimum=-1, env="LLAMA_ARG_SSE_PING_INTERVAL")
    cache_prompt: bool = opt(True, "--cache-prompt", "switch", "reuse the part of a prompt that a slot holds already, unless the request says otherwise", topic="server", commands="SC", negative="--no-cache-prompt", example="--no-cache-prompt", env="LLAMA_ARG_CACHE_PROMPT")
    cache_reuse: int = opt(0, "--cache-reuse", "int", "accepted; prompts are reused from their start only", topic="server", commands="S", form="N", example="--cache-reuse 256", minimum=0, env="LLAMA_ARG_CACHE_REUSE")
    reasoning_format: str = opt("auto", "--reasoning-format", "choice", "where thoughts go: none leaves them in the text, deepseek puts them in reasoning_content, deepseek-legacy does both", topic="server", commands="SC", form="none|deepseek|deepseek-legacy|auto", example="--reasoning-format none", choices=("none", "deepseek", "deepseek-legacy", "auto"), env="LLAMA_ARG_THINK")
    reasoning: str = opt("auto", "-rea --reasoning", "choice", "let the model think: on, off, or as its template does", topic="server", commands="SC", form="on|off|auto", example="--reasoning off", choices=("on", "off", "auto"), env="LLAMA_ARG_REASONING")
    reasoning_budget: int = opt(-1, "--reasoning-budget --reasoning-tokens", "int", "tokens of thinking; 0 = none, -1 = unlimited", topic="server", commands="SC", form="N", example="--reasoning-budget 512", minimum=-1, env="LLAMA_ARG_THINK_BUDGET")
    reasoning_budget_message: str = opt("", "--reasoning-budget-message", "str", "text put before the end of thinking when the budget is used up", topic="server", commands="SC", form="TEXT", example='--reasoning-budget-message "Time is up."', env="LLAMA_ARG_THINK_BUDGET_MESSAGE")
    chat_template_kwargs: str = opt("", "--chat-template-kwargs", "str", "variables for the chat template, as a JSON object", topic="server", commands="SC", form="JSON", example="--chat-template-kwargs '{}'", env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS")
    prefill_assistant: bool = opt(True, "--prefill-assistant", "switch", "a last message of the assistant is continued instead of answered", topic="server", commands="SC", negative="--no-prefill-assistant", example="--no-prefill-assistant", env="LLAMA_ARG_PREFILL_ASSISTANT")
    jinja: bool = opt(True, "--jinja", "optswitch", "use the Jinja template of the model", topic="server", commands="SC", negative="--no-jinja", example="--jinja")
    skip_chat_parsing: bool = opt(False, "--skip-chat-parsing", "switch", "all that the model writes is content: thoughts and calls of tools are left in it", topic="server", commands="S", negative="--no-skip-chat-parsing", example="--skip-chat-parsing", env="LLAMA_ARG_SKIP_CHAT_PARSING")
    reasoning_effort: str = opt("default", "--reasoning-effort", "str", "how much the model thinks: none, or a level that its template knows, such as low, medium or high; default = as its template says", topic="server", commands="SC", form="LEVEL", example="--reasoning-effort low", env="LLAMA_ARG_REASONING_EFFORT")
    reasoning_preserve: bool | None = opt(None, "--reasoning-preserve", "switch", "keep thoughts of earlier turns in the prompt, or leave them out, where the template can. Default: as the template does", topic="server", commands="SC", negative="--no-reasoning-preserve", example="--reasoning-preserve", env="LLAMA_ARG_REASONING_PRESERVE")
    tags: str = opt("", "--tags", "str", "tags of the model in /v1/models, separated by commas; they change nothing", topic="server", commands="S", form="LIST", example="--tags chat,small", env="LLAMA_ARG_TAGS")
    spm_infill: bool = opt(False, "--spm-infill", "switch", "prompts of /infill begin with the suffix, as some models want it", topic="server", commands="S", example="--spm-infill")
    log_prompts_dir: Path | None = opt(None, "--log-prompts-dir", "path", "write every prompt into a file of this folder, to look for mistakes; it is made for its owner alone", topic="server", commands="S", form="DIR", example="--log-prompts-dir prompts")
    reuse_port: bool = opt(False, "--reuse-port", "switch", "several servers may listen on the port; the system shares connections out", topic="server", commands="S", example="--reuse-port", env="LLAMA_ARG_REUSE_PORT")
    cors_methods: str = opt("", "--cors-methods", "str", "methods that browsers may use from other origins; default GET, POST, and with several models DELETE", topic="server", commands="S", form="LIST", example='--cors-methods "GET, POST"', env="LLAMA_ARG_CORS_METHODS")
    cors_headers: str = opt("*", "--cors-headers", "str", "headers that browsers may send from other origins; * = those that they ask for", topic="server", commands="S", form="LIST", example='--cors-headers "Content-Type, Authorization"', env="LLAMA_ARG_CORS_HEADERS")
    cors_credentials: bool = opt(True, "--cors-credentials", "switch", "browsers may send credentials from other origins", topic="server", commands="S", negative="--no-cors-credentials", example="--no-cors-credentials", env="LLAMA_ARG_CORS_CREDENTIALS")
    ui_config: str = opt("", "--ui-config --webui-config", "str", "settings that the web page begins with, as a JSON object (docs/serve.md)", topic="server", commands="S", form="JSON", example="--ui-config '{\"temperature\": 0.2}'", env="LLAMA_ARG_UI_CONFIG")
    ui_config_file: Path | None = opt(None, "--ui-config-file --webui-config-file", "path", "file with the settings of --ui-config", topic="server", commands="S", form="FILE", example="--ui-config-file page.json", env="LLAMA_ARG_UI_CONFIG_FILE")

    @property
    def only_embeds(self) -> bool:
        """Whether nothing is generated."""
        return self.embeddings or self.reranking

    @property
    def several_models(self) -> bool:
        """Whether models are named by a file, a folder or the cache, and not by -m."""
        return self.models is not None or self.models_preset is not None or self.models_dir is not None or bool(self.models_cache)


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """sweep-bench: speed at growing depths."""

    warmup_batch: bool = opt(True, "-wb --warmup-batch", "switch", "also warm up with one full ubatch; --no-warmup turns this off too", topic="sweep-bench", commands="W", negative="--no-warmup-batch", example="--no-warmup-batch")
    repetitions: int = opt(1, "-nrep --n-repetitions", "int", "repetitions of the first row", topic="sweep-bench", commands="W", form="N", example="-nrep 3", minimum=1)
    stride: int = opt(1, "--sweep-stride", "int", "measure every Nth depth only", topic="sweep-bench", commands="W", form="N", example="--sweep-stride 4", minimum=1)
    memory: bool = opt(False, "--sweep-memory", "switch", "add columns with the highest memory use", topic="sweep-bench", commands="W", example="--sweep-memory")
    output_format: str = opt("md", "--output-format", "choice", "form of the table", topic="sweep-bench", commands="W", form="md|table|jsonl|jsonl-full", example="--output-format jsonl", choices=("md", "table", "jsonl", "jsonl-full"))
    plot: Path | None = opt(None, "--plot", "path", "draw PP and TG over N_KV into this file at the end (.png, .svg, .pdf)", topic="sweep-bench", commands="W", form="FILE", example="--plot speed.png")
    max_depth: int = opt(0, "--max-depth", "int", "last depth to measure; 0 = whole context", topic="sweep-bench", commands="W", form="N", example="--max-depth 8192", minimum=0)
    start_depth: int = opt(0, "--start-depth", "int", "first depth to measure", topic="sweep-bench", commands="W", form="N", example="--start-depth 4096", minimum=0)
    pp: int = opt(0, "--pp", "int", "prompt tokens per row; 0 = ubatch", topic="sweep-bench", commands="W", form="N", example="--pp 256", minimum=0)


@dataclass(frozen=True, slots=True)
class BatchedBenchConfig:
    """batched-bench: speed of several sequences at once; all combinations of the lists are measured."""

    npp: tuple[int, ...] = opt((512,), "-npp", "custom", "prompt lengths", topic="batched-bench", commands="D", form="N[,N...]", example="-npp 128,256,512", parse=parse_int_list, bench_list=False)
    ntg: tuple[int, ...] = opt((128,), "-ntg", "custom", "tokens that every sequence generates", topic="batched-bench", commands="D", form="N[,N...]", example="-ntg 128,256", parse=parse_int_list, bench_list=False)
    npl: tuple[int, ...] = opt((1, 2, 4, 8, 16, 32), "-npl", "custom", "numbers of sequences", topic="batched-bench", commands="D", form="N[,N...]", example="-npl 1,2,4,8,16,32", parse=parse_int_list, bench_list=False)
    shared_prompt: bool = opt(False, "-pps", "switch", "all sequences share one prompt, which is computed once", topic="batched-bench", commands="D", example="-pps")
    output_format: str = opt("md", "--output-format", "choice", "form of the table", topic="batched-bench", commands="D", form="md|table|jsonl|jsonl-full", example="--output-format jsonl", choices=("md", "table", "jsonl", "jsonl-full"))


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """bench: speed of given tests; every option takes a comma list of alternatives."""

    n_prompt: tuple[int, ...] = opt((512,), "-p --n-prompt", "custom", "prompt lengths to test", topic="bench", commands="B", form="N[,N...]", example="-p 512", parse=parse_int_list, bench_list=False)
    n_gen: tuple[int, ...] = opt((128,), "-n --n-gen", "custom", "generation lengths to test", topic="bench", commands="B", form="N[,N...]", example="-n 128", parse=parse_int_list, bench_list=False)
    pg: tuple[tuple[int, int], ...] = opt((), "-pg", "custom", "test ppP+tgN: prompt and generation together", topic="bench", commands="B", form="P,N", example="-pg 512,128", parse=parse_pairs, repeat=True, bench_list=False)
    gp: tuple[tuple[int, int], ...] = opt((), "-gp", "custom", "test tgN@ppP: generation after a prompt, only generation timed", topic="bench", commands="B", form="P,N", example="-gp 8192,64", parse=parse_pairs, repeat=True, bench_list=False)
    n_depth: tuple[int, ...] = opt((0,), "-d --n-depth", "custom", "tokens in the cache before each test, computed once and not timed", topic="bench", commands="B", form="N[,N...]", example="-d 0,4096", parse=parse_int_list, bench_list=False)
    repetitions: int = opt(5, "-r --repetitions", "int", "repetitions of each test", topic="bench", commands="B", form="N", example="-r 5", bench_list=False)
    warmup: bool = opt(True, "-w --warmup", "optswitch", "warm up before each test", topic="bench", commands="B", example="-w 0", bench_list=False)
    output: str = opt("md", "-o --output", "choice", "form of the results", topic="bench", commands="B", form="csv|json|jsonl|md|sql", example="-o json", choices=("csv", "json", "jsonl", "md", "sql"), bench_list=False)
    output_err: str = opt("", "-oe --output-err", "choice", "form of a second copy of the results on stderr", topic="bench", commands="B", form="csv|json|jsonl|md|sql", example="-oe md", choices=("csv", "json", "jsonl", "md", "sql"), bench_list=False)
    threads_gen_batch: tuple[tuple[int, int], ...] = opt((), "-tgb --threads-gen-batch", "custom", "pairs of generation and prompt threads", topic="bench", commands="B", form="G,B[;G,B...]", example="-tgb 4,16", parse=parse_thread_pairs, bench_list=False)
    compare: tuple[str, ...] = opt((), "--compare", "custom", "measure sides in turns and print ratios to the first one: options for ik bench, or a command (ik sweep-bench, /path/llama-bench); all other options are for every side. One side alone is compared with these (repeatable)", topic="bench", commands="B", form="[NAME=]SIDE", example='--compare "-rtr 0" --compare "-rtr 1"', parse=parse_text_item, repeat=True, bench_list=False, text=True)
    rounds: int = opt(10, "--rounds", "int", "with --compare: runs of every side at most", topic="bench", commands="B", form="N", example="--rounds 20", minimum=2, bench_list=False)
    precision: float = opt(1.0, "--precision", "float", "with --compare: stop when half of every 95 % interval is below this many percent", topic="bench", commands="B", form="PERCENT", example="--precision 0.5", minimum=0, bench_list=False)


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """perplexity and KL divergence."""

    chunks: int = opt(-1, "--chunks", "int", "number of chunks to evaluate; -1 = all", topic="perplexity", commands="PI", form="N", example="--chunks 8", minimum=-1)
    stride: int = opt(0, "--ppl-stride", "int", "step between windows; 0 = plain chunks", topic="perplexity", commands="P", form="N", example="--ppl-stride 256")
    output_type: int = opt(0, "--ppl-output-type", "choice", "0: running values on one line; 1: one line per chunk", topic="perplexity", commands="P", form="0|1", example="--ppl-output-type 1", choices=("0", "1"))
    logits_file: Path | None = opt(None, "--kl-divergence-base --save-all-logits", "path", "file of reference logits: written, or read with --kl-divergence", topic="perplexity", commands="P", form="FILE", example="--kl-divergence-base base.logits")
    kl_divergence: bool = opt(False, "--kl-divergence", "switch", "compare with the logits of --kl-divergence-base", topic="perplexity", commands="P", example="--kl-divergence")
    hellaswag: bool = opt(False, "--hellaswag", "switch", "HellaSwag score of the tasks in -f FILE: six lines each (context, index of the right ending, four endings)", topic="perplexity", commands="P", example="--hellaswag")
    hellaswag_tasks: int = opt(400, "--hellaswag-tasks", "int", "number of HellaSwag tasks to use", topic="perplexity", commands="P", form="N", example="--hellaswag-tasks 1000", minimum=1)
    winogrande: bool = opt(False, "--winogrande", "switch", "Winogrande score of the tasks in -f FILE: CSV of index, sentence with _, two choices, answer (1 or 2)", topic="perplexity", commands="P", example="--winogrande")
    winogrande_tasks: int = opt(0, "--winogrande-tasks", "int", "number of Winogrande tasks to use; 0 = all", topic="perplexity", commands="P", form="N", example="--winogrande-tasks 500", minimum=0)
    multiple_choice: bool = opt(False, "--multiple-choice", "switch", "share of right answers to the multiple-choice tasks in -f FILE (binary, as made for llama.cpp: ARC, MMLU, TruthfulQA)", topic="perplexity", commands="P", example="--multiple-choice")
    multiple_choice_tasks: int = opt(0, "--multiple-choice-tasks", "int", "number of multiple-choice tasks to use; 0 = all", topic="perplexity", commands="P", form="N", example="--multiple-choice-tasks 500", minimum=0)
    fail_on_nan: bool = opt(True, "--fail-on-nan", "switch", "stop at the first chunk that is not finite", topic="perplexity", commands="P", negative="--no-fail-on-nan", example="--fail-on-nan")

    @property
    def scores_choices(self) -> bool:
        """Whether choices are scored instead of a text."""
        return self.hellaswag or self.winogrande or self.multiple_choice


@dataclass(frozen=True, slots=True)
class ImatrixConfig:
    """imatrix: importance of weight columns, measured on a text."""

    output: Path = opt(Path("imatrix.dat"), "-o --output --output-file", "path", "file to write", topic="imatrix", commands="I", form="FILE", example="-o imatrix.dat")
    output_frequency: int = opt(10, "-ofreq --output-frequency", "int", "write the file every N chunks", topic="imatrix", commands="I", form="N", example="-ofreq 10", minimum=1)
    save_frequency: int = opt(0, "--save-frequency", "int", "keep a copy every N chunks; 0 = never", topic="imatrix", commands="I", form="N", example="--save-frequency 50")
    process_output: bool = opt(False, "--process-output", "switch", "measure the output tensor too", topic="imatrix", commands="I", example="--process-output")
    output_tensor_name: str = opt("output.weight", "--output-tensor-name", "str", "name of the output tensor", topic="imatrix", commands="I", form="NAME", example="--output-tensor-name output.weight")
    ppl: bool = opt(True, "--ppl", "switch", "compute perplexity on the way", topic="imatrix", commands="I", negative="--no-ppl", example="--no-ppl")
    from_chunk: int = opt(0, "--chunk --from-chunk", "int", "first chunk to use", topic="imatrix", commands="I", form="N", example="--from-chunk 10", minimum=0)
    layer_similarity: bool = opt(False, "-lsim --layer-similarity", "switch", "report how similar the input and output of layers are", topic="imatrix", commands="I", example="-lsim")
    hide_imatrix: bool = opt(False, "--hide-imatrix", "switch", "do not store file and data set names", topic="imatrix", commands="I", example="--hide-imatrix")
    in_file: tuple[Path, ...] = opt((), "--in-file", "custom", "importance matrix to go on from; several are merged, and without -f or -p that is all. A file that is none is the text", topic="imatrix", commands="I", form="FILE", example="--in-file part.dat", parse=lambda text: (Path(text),), repeat=True, bench_list=False)
    output_format: str = opt("auto", "--output-format", "choice", "format of the file; auto: gguf if its name ends so", topic="imatrix", commands="I", form="auto|dat|gguf", example="--output-format gguf", choices=("auto", "dat", "gguf"))
    covariance: Path | None = opt(None, "--covariance", "path", "write second moments of all inputs too, for ik quantize --covariance; GGUF", topic="imatrix", commands="I", form="FILE", example="--covariance covariance.gguf")
    random_tokens: int = opt(0, "--random-tokens", "int", "instead of a text, N tokens drawn evenly from the vocabulary: for --covariance they serve nearly as well; mean squares are better taken from a text", topic="imatrix", commands="I", form="N", example="--random-tokens 16384", minimum=0)
    covariance_limit: int = opt(512, "--covariance-limit", "int", "MiB per input (of all experts of a layer); what would take more is measured in blocks of columns", topic="imatrix", commands="I", form="MIB", example="--covariance-limit 2048", minimum=1)
    show_statistics: bool = opt(False, "--show-statistics", "switch", "print a table about the importance matrices of --in-file and stop", topic="imatrix", commands="I", example="--show-statistics")
    compare: bool = opt(False, "--compare", "switch", "compare the two importance matrices of --in-file tensor by tensor, worst first, and stop", topic="imatrix", commands="I", example="--compare")


_TUNING = "tuning flag of the C++ programs, not supported"
_NO_EFFECT = "accepted for old command lines"


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Flags that are accepted and change nothing; `noop` is the reason shown once."""

    grouped_experts: bool = opt(False, "-ger --grouped-expert-routing", "switch", "route experts by groups", topic="accepted, no effect", noop=_TUNING)
    only_active_experts: bool = opt(False, "-ooae --offload-only-active-experts", "switch", "upload the selected experts only", topic="accepted, no effect", negative="-no-ooae --no-offload-only-active-experts", noop=_TUNING)
    merge_up_gate: bool = opt(False, "-muge --merge-up-gate-experts", "switch", "store up and gate experts together", topic="accepted, no effect", noop=_TUNING)
    merge_qkv: bool = opt(False, "-mqkv --merge-qkv", "switch", "store Q, K and V together", topic="accepted, no effect", noop=_TUNING)
    graph_reuse: bool = opt(False, "-gr --graph-reuse", "switch", "reuse compute graphs (always done here)", topic="accepted, no effect", negative="-no-gr --no-graph-reuse", noop=_TUNING)
    scheduler_async: bool = opt(False, "-sas --scheduler-async", "switch", "asynchronous scheduling", topic="accepted, no effect", noop=_TUNING)
    graph_scheduling: bool = opt(False, "-smgs --split-mode-graph-scheduling", "switch", "scheduling of split mode graph", topic="accepted, no effect", noop=_TUNING)
    rope_cache: bool = opt(False, "-rcache --rope-cache", "switch", "keep rotation tables", topic="accepted, no effect", noop=_TUNING)
    no_fused_up_gate: bool = opt(False, "-no-fug --no-fused-up-gate", "switch", "keep dense up and gate apart", topic="accepted, no effect", noop=_TUNING)
    no_fused_mul_add: bool = opt(False, "-no-mmad --no-fused-mul-multiadd", "switch", "keep multiply and add apart", topic="accepted, no effect", noop=_TUNING)
    repack: bool = opt(False, "--repack", "optswitch", "let a program repack weights (here -rtr does)", topic="accepted, no effect", negative="-nr --no-repack", noop=_NO_EFFECT)
    no_host: bool = opt(False, "--no-host", "optswitch", "kinds of buffers in host memory", topic="accepted, no effect", noop=_NO_EFFECT)
    prio: int = opt(0, "--prio", "int", "process priority", topic="accepted, no effect", form="N", noop=_NO_EFFECT)
    poll: int = opt(50, "--poll", "int", "polling level", topic="accepted, no effect", form="N", noop=_NO_EFFECT)
    log_colors: bool = opt(False, "--log-colors", "optswitch", "coloured log", topic="accepted, no effect", noop=_NO_EFFECT)
