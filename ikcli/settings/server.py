"""Options of `ik serve`."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.records import SpecSetting, SpecStage
from ikcli.settings.values import (
    parse_devices,
    parse_layers,
    parse_rules,
    parse_spec_setting,
    parse_spec_type,
)

# One partial per topic, with the values that its options share.
_server = partial(opt, topic="server", commands="S")
_speculation = partial(opt, topic="speculation", commands="SCB")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of the HTTP server."""

    alias: str = _server("", "-a --alias", "str", form="NAME[,NAME...]", example="-a my-model",
        env="LLAMA_ARG_MODEL_ALIAS LLAMA_ARG_ALIAS",
        help="model name in the API, or several, separated by commas; default the file name")
    host: str = _server("127.0.0.1", "--host", "str", form="ADDR[,ADDR...]", example="--host 0.0.0.0",
        env="LLAMA_ARG_HOST",
        help="address to listen on: a name or number, a path that ends in .sock, or fd:N, an inherited socket; "
        "several separated by commas (:: is then IPv6 only)")
    port: int = _server(8080, "--port", "int", form="N", example="--port 8080", minimum=0, env="LLAMA_ARG_PORT",
        help="port to listen on")
    api_key: str = _server("", "--api-key", "str", commands="SC", form="KEY", example="--api-key secret",
        env="LLAMA_API_KEY",
        joined="S",
        help="key that requests must carry; several separated by commas or repeated. In chat: the key sent to the "
        "server of --url")
    api_key_file: Path | None = _server(None, "--api-key-file", "path", form="FILE", example="--api-key-file keys.txt",
        env="LLAMA_ARG_API_KEY_FILE", help="file with one key per line")
    keys: Path | None = _server(None, "--keys", "path", form="FILE", example="--keys keys.toml",
        help="TOML file of users with a key each, and their limits (docs/serve.md)")
    models: Path | None = _server(None, "--models", "path", form="FILE", example="--models models.toml",
        help="serve the models of a TOML file behind one port; each is loaded when a request asks for it "
        "(docs/serve-models.md)")
    models_preset: Path | None = _server(None, "--models-preset", "path", form="FILE",
        example="--models-preset presets.ini", env="LLAMA_ARG_MODELS_PRESET",
        help="same as --models, but with a preset file of llama.cpp: INI, a section per model (docs/serve-models.md)")
    models_dir: Path | None = _server(None, "--models-dir", "path", form="DIR", example="--models-dir models",
        env="LLAMA_ARG_MODELS_DIR",
        help="serve the GGUF files of a folder behind one port, each by its name without .gguf")
    models_cache: bool | None = _server(None, "--models-cache", "switch", negative="--no-models-cache",
        example="--models-cache",
        help="serve the downloaded models of the hub's cache behind one port, each as user/repo:quant; with it POST "
        "/models downloads more. Default: with --models-dir and --models-preset")
    models_max: int | None = _server(None, "--models-max", "int", form="N", example="--models-max 2", minimum=0,
        env="LLAMA_ARG_MODELS_MAX",
        help="most models loaded at a time; the least recently used one is unloaded. 0 = as many as fit into memory. "
        "Default: 4, with --models 0")
    models_autoload: bool = _server(True, "--models-autoload", "switch", negative="--no-models-autoload",
        example="--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD",
        help="load a model when a request asks for it; a request's ?autoload=true or false overrides it")
    sleep_idle_seconds: int = _server(-1, "--sleep-idle-seconds", "int", form="S", example="--sleep-idle-seconds 600",
        minimum=-1,
        help="release the memory of a model after this many seconds without a request; the next one loads it again. "
        "-1 or 0 = never")
    replicas: int = _server(1, "--replicas", "int", form="N", example="--replicas 4", minimum=1,
        help="serve the model with this many processes behind one port: on this machine, where they share CPUs and "
        "the threads of -t, or on Ray (--ray). Requests are routed by cached prefix (docs/fleet.md)")
    replica_gpus: int = _server(0, "--replica-gpus", "int", form="N", example="--replica-gpus 1", minimum=0,
        help="GPUs of each replica: assigned on this machine, reserved on Ray; 0 = every replica sees all")
    timeout: int = _server(600, "-to --timeout", "int", form="S", example="--timeout 600", minimum=0,
        env="LLAMA_ARG_TIMEOUT", help="read and write timeout in seconds")
    threads_http: int = _server(-1, "--threads-http", "int", form="N", example="--threads-http 4",
        env="LLAMA_ARG_THREADS_HTTP", help="threads for HTTP requests; -1 = CPUs - 1")
    metrics: bool = _server(False, "--metrics", "switch", example="--metrics", env="LLAMA_ARG_ENDPOINT_METRICS",
        help="serve /metrics")
    slots: bool = _server(True, "--slots", "switch", negative="--no-slots", example="--no-slots",
        env="LLAMA_ARG_ENDPOINT_SLOTS", help="serve /slots")
    path: Path | None = _server(None, "--path", "path", form="DIR", example="--path public",
        env="LLAMA_ARG_STATIC_PATH", help="folder of static files to serve")
    log_format: str = _server("text", "--log-format", "choice", form="text|json", example="--log-format json",
        choices=("text", "json"), help="format of the server log")
    first_slot: int = _server(0, "--first-slot", "int", form="N", example="--first-slot 4", minimum=0,
        help="number of the first slot in requests and answers; servers behind one port use different numbers")
    slot_save_path: Path | None = _server(None, "--slot-save-path", "path", form="DIR",
        example="--slot-save-path slots", env="LLAMA_ARG_SLOT_SAVE_PATH", help="folder for saved slots")
    slot_prompt_similarity: float = _server(0.5, "-sps --slot-prompt-similarity", "float", form="F", example="-sps 0.5",
        help="how much of a prompt must match to reuse a slot; 0 = off")
    ctx_checkpoints: int = _server(32, "-ctx-ckpt --ctx-checkpoints -ctxcp --swa-checkpoints", "int", commands="SC",
        form="N", example="-ctx-ckpt 16", minimum=0, env="LLAMA_ARG_CTX_CHECKPOINTS",
        help="checkpoints kept per slot, to roll back to when the end of a prompt changes; for models with windows or "
        "recurrent layers, others can roll back to any position. 0 = none")
    ctx_checkpoints_interval: int = _server(512,
        "-ctx-ckpt-i --ctx-checkpoints-interval -cpent --checkpoint-every-n-tokens -cms --checkpoint-min-step", "int",
        commands="SC", form="N", example="-ctx-ckpt-i 1024",
        help="tokens of a prompt between two checkpoints; 0 = only at turns and at the end")
    ctx_checkpoints_tolerance: int = _server(5, "-ctx-ckpt-t --ctx-checkpoints-tolerance", "int", commands="SC",
        form="N", example="-ctx-ckpt-t 8",
        help="make a checkpoint this many tokens before the end of a prompt; 0 = none")
    ctx_checkpoints_eviction: str = _server("auto", "-ctx-ckpt-e --ctx-checkpoints-eviction", "choice", commands="SC",
        form="NAME", example="-ctx-ckpt-e fifo", choices=("auto", "variance", "fifo"),
        help="which checkpoint to drop when there are too many: the oldest (fifo), or the one that leaves the "
        "smallest gap (variance)")
    cache_ram: int | None = _server(None, "-cram --cache-ram", "int", commands="SC", form="MIB", example="-cram 2048",
        minimum=-1, env="LLAMA_ARG_CACHE_RAM",
        help="RAM for prompts whose slot was given away; what they have in common is stored once. 0 = off, -1 = no "
        "limit. Default: a quarter of the free memory, at most 8192")
    cache_disk: Path | None = _server(None, "--cache-disk --sessions", "path", form="DIR", example="--cache-disk cache",
        help="keep the prompt cache in this folder too: what leaves RAM, and all of it across restarts. Its files "
        "contain what users wrote; only the owner can read them")
    cache_disk_limit: float = _server(8.0, "--cache-disk-limit", "float", form="GIB", example="--cache-disk-limit 100",
        minimum=0, help="GiB that the folder of --cache-disk may hold; the least recently used files are removed first")
    sessions_limit: int | None = _server(None, "--sessions-limit", "int", form="MIB", example="--sessions-limit 20000",
        minimum=1, help="--cache-disk-limit in MiB, which takes its place")
    cache_rest: str = _server("cache", "--cache-rest", "choice", form="TYPE", example="--cache-rest q8_0",
        choices=("cache", "q8_0"),
        help="type of rows in the prompt cache: that of the cache, or q8_0, which stores f16 rows in 53% of the bytes "
        "and rounds them")
    cache_explain: bool = _server(False, "--cache-explain", "switch", example="--cache-explain",
        help="print the prompt cache as a tree whenever a request begins, with the slots and what each text takes")
    spec_type: tuple[SpecStage, ...] = _speculation((), "--spec-type", "custom", form="TYPE[:K=V,...]",
        example="--spec-type ngram-simple:n_max=7", parse=parse_spec_type, repeat=True, bench_list=False,
        env="LLAMA_ARG_SPEC_TYPE", commands="SCLB",
        help="speculative decoding: the drafter (mtp: the model's own heads, eagle3, dflash, dspark: a file's), with "
        "keys n_max, n_min, p_min, ngram_size_n, ngram_size_m, ngram_min_hits; the text stays the same. Repeatable: "
        "later ones draft if earlier ones have no draft")
    spec_set: tuple[SpecSetting, ...] = _speculation((), "--spec-set", "custom", form="TYPE:K=V",
        example="--spec-set ngram-mod:n_max=32", parse=parse_spec_setting, repeat=True, bench_list=False,
        help="setting for a --spec-type that does not set it; ngram stands for all n-gram types. Repeatable")
    model_draft: Path | None = _speculation(None, "-md --model-draft --spec-draft-model", "path", form="FILE",
        commands="SCLPIB", example="-md draft.gguf", bench_list=False,
        env="LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_MODEL_DRAFT",
        help="draft model: a small model of the same vocabulary, for speculative decoding; with --spec-type mtp, a "
        "file of heads (ik convert --mtp) or an assistant of Gemma 4, used instead of the model's own; with eagle3, "
        "dflash and dspark the head")
    hf_repo_draft: str = _speculation("", "-hfd -hfrd --hf-repo-draft --spec-draft-hf", "str", form="USER/REPO[:QUANT]",
        example="-hfd user/small:Q8_0", bench_list=False, env="LLAMA_ARG_HFD_REPO LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        help="draft model from a Hugging Face repository, in the form of -hf")
    draft_max: int = _speculation(16, "--draft-max --draft --draft-n --spec-draft-n-max", "int", form="N",
        example="--draft-max 7", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX",
        help="most tokens of a draft")
    draft_min: int = _speculation(0, "--draft-min --draft-n-min --spec-draft-n-min", "int", form="N",
        example="--draft-min 2", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_DRAFT_MIN",
        help="fewest tokens of a draft")
    draft_p_min: float = _speculation(0.75, "--draft-p-min --spec-draft-p-min", "float", form="P",
        example="--draft-p-min 0.5", minimum=0, env="LLAMA_ARG_SPEC_DRAFT_P_MIN",
        help="probability below which a draft model stops drafting")
    draft_ctx: int = _speculation(0, "-cd --ctx-size-draft", "int", form="N", example="-cd 4096", minimum=0,
        help="context of the draft model; 0 = same as the model")
    draft_type_k: str = _speculation("f16", "-ctkd --cache-type-k-draft --spec-draft-type-k", "str", form="TYPE",
        example="-ctkd q8_0", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", help="type of the draft model's K cache")
    draft_type_v: str = _speculation("f16", "-ctvd --cache-type-v-draft --spec-draft-type-v", "str", form="TYPE",
        example="-ctvd q8_0", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V", help="type of the draft model's V cache")
    draft_gpu_layers: int | None = _speculation(None, "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
        "custom", form="N|all|auto", example="-ngld 99", parse=parse_layers, env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        help="blocks of the draft model on the GPU; default: as for the model")
    draft_override_tensor: tuple[str, ...] = _speculation((), "-otd --override-tensor-draft "
        "--spec-draft-override-tensor", "custom", form="RE=BUF[,RE=BUF...]", example="-otd exps=CPU",
        parse=parse_rules, repeat=True, bench_list=False,
        help="-ot for the draft model, which has rules of its own")
    draft_device: tuple[str, ...] = _speculation((), "-devd --device-draft --spec-draft-device", "custom",
        form="CUDA0,CUDA1", example="-devd CUDA1", parse=parse_devices, bench_list=False,
        help="devices of the draft model; default: those of the model")
    spec_autotune: bool = _speculation(True, "--spec-autotune", "switch", negative="--no-spec-autotune",
        commands="SC", example="--no-spec-autotune",
        help="choose the length of every draft, none included, by measured costs and acceptance, up to n_max; "
        "--no-spec-autotune: drafts are as long as n_max allows (docs/speculation.md)")
    spec_explain: bool = _speculation(False, "--spec-explain", "switch", commands="SC", example="--spec-explain",
        help="log how many tokens are drafted, and why")
    banned_string_file: Path | None = opt(None, "--banned-string-file", "path", topic="sampling", commands="SC",
        form="FILE", example="--banned-string-file slop.txt",
        help="texts that no output may contain, one per line; a request's banned_strings replace them")
    banned_n: int = opt(1, "--banned-n", "int", topic="sampling", commands="SC", form="N", example="--banned-n 1",
        minimum=-1, help="tokens of a banned text to ban at the place where it began; -1 = all, 0 = none")
    cont_batching: bool = _server(True, "-cb --cont-batching", "switch", negative="-nocb --no-cont-batching",
        example="-cb", env="LLAMA_ARG_CONT_BATCHING", help="serve several slots in one batch")
    context_shift: bool = _server(True, "--context-shift", "optswitch", commands="SC", negative="--no-context-shift",
        example="--context-shift off", env="LLAMA_ARG_CONTEXT_SHIFT", help="drop old tokens when the context is full")
    chat_template: str = _server("", "--chat-template", "str", commands="SC", form="TEXT",
        example="--chat-template chatml", text=True, env="LLAMA_ARG_CHAT_TEMPLATE",
        help="chat template to use instead of the one in the model file")
    chat_template_file: Path | None = _server(None, "--chat-template-file", "path", commands="SC", form="FILE",
        example="--chat-template-file chat.jinja", env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        help="file with the chat template")
    props: bool = _server(False, "--props", "switch", example="--props", env="LLAMA_ARG_ENDPOINT_PROPS",
        help="allow POST /props")
    embeddings: bool = _server(False, "--embeddings --embedding", "switch", example="--embeddings",
        env="LLAMA_ARG_EMBEDDINGS",
        help="only embed: the output matrix is not loaded and nothing is generated. Otherwise a server does both")
    reranking: bool = _server(False, "--reranking --rerank", "switch", example="--reranking", env="LLAMA_ARG_RERANKING",
        help="only rank documents (needs a classification head): same as --embeddings --pooling rank")
    webui: str = _server("auto", "--webui", "str", form="NAME", example="--webui none",
        help="web page at /; none = no page")
    ui: bool = _server(True, "--ui", "switch", negative="--no-webui --no-ui", example="--no-webui", env="LLAMA_ARG_UI",
        help="web page at /")
    api_prefix: str = _server("", "--api-prefix", "str", form="PATH", example="--api-prefix /llm",
        env="LLAMA_ARG_API_PREFIX", help="path in front of all endpoints")
    ssl_key_file: Path | None = _server(None, "--ssl-key-file", "path", form="FILE", example="--ssl-key-file key.pem",
        env="LLAMA_ARG_SSL_KEY_FILE", help="private key (PEM); with --ssl-cert-file the server speaks HTTPS")
    ssl_cert_file: Path | None = _server(None, "--ssl-cert-file", "path", form="FILE",
        example="--ssl-cert-file cert.pem", env="LLAMA_ARG_SSL_CERT_FILE", help="certificate (PEM)")
    shutdown_timeout: int = _server(5, "--shutdown-timeout", "int", form="S", example="--shutdown-timeout 30",
        minimum=0, help="seconds for running requests to finish after SIGTERM; a second signal stops at once")
    cors_origins: str = _server("*", "--cors-origins", "str", form="LIST", example="--cors-origins localhost",
        env="LLAMA_ARG_CORS_ORIGINS",
        help="origins that browsers may call from, separated by commas; localhost = pages on this machine")
    sse_ping_interval: int = _server(30, "--sse-ping-interval", "int", form="S", example="--sse-ping-interval 10",
        minimum=-1, env="LLAMA_ARG_SSE_PING_INTERVAL",
        help="seconds without output after which a stream sends a comment; -1 = never")
    cache_prompt: bool = _server(True, "--cache-prompt", "switch", commands="SC", negative="--no-cache-prompt",
        example="--no-cache-prompt", env="LLAMA_ARG_CACHE_PROMPT",
        help="reuse the cached part of a prompt, unless the request turns this off")
    cache_reuse: int = _server(0, "--cache-reuse", "int", form="N", example="--cache-reuse 256", minimum=0,
        env="LLAMA_ARG_CACHE_REUSE", help="accepted; prompts are reused from their start only")
    reasoning_format: str = _server("auto", "--reasoning-format", "choice", commands="SC",
        form="none|deepseek|deepseek-legacy|auto", example="--reasoning-format none",
        choices=("none", "deepseek", "deepseek-legacy", "auto"), env="LLAMA_ARG_THINK",
        help="where to put reasoning: none leaves it in the text, deepseek moves it to reasoning_content, "
        "deepseek-legacy does both")
    reasoning: str = _server("auto", "-rea --reasoning", "choice", commands="SC", form="on|off|auto",
        example="--reasoning off", choices=("on", "off", "auto"), env="LLAMA_ARG_REASONING",
        help="let the model think: on, off, or auto, as its template decides")
    reasoning_budget: int = _server(-1, "--reasoning-budget --reasoning-tokens", "int", commands="SC", form="N",
        example="--reasoning-budget 512", minimum=-1, env="LLAMA_ARG_THINK_BUDGET",
        help="tokens of thinking; 0 = none, -1 = unlimited")
    reasoning_budget_message: str = _server("", "--reasoning-budget-message", "str", commands="SC", form="TEXT",
        example='--reasoning-budget-message "Time is up."', env="LLAMA_ARG_THINK_BUDGET_MESSAGE",
        help="text put before the end of thinking when the budget is used up")
    chat_template_kwargs: str = _server("", "--chat-template-kwargs", "str", commands="SC", form="JSON",
        example="--chat-template-kwargs '{}'", env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        help="variables for the chat template, as a JSON object")
    prefill_assistant: bool = _server(True, "--prefill-assistant", "switch", commands="SC",
        negative="--no-prefill-assistant", example="--no-prefill-assistant", env="LLAMA_ARG_PREFILL_ASSISTANT",
        help="continue a last message of the assistant instead of answering it")
    jinja: bool = _server(True, "--jinja", "optswitch", commands="SC", negative="--no-jinja", example="--jinja",
        help="use the Jinja template of the model")
    skip_chat_parsing: bool = _server(False, "--skip-chat-parsing", "switch", negative="--no-skip-chat-parsing",
        example="--skip-chat-parsing", env="LLAMA_ARG_SKIP_CHAT_PARSING",
        help="return all output as content, including reasoning and tool calls")
    reasoning_effort: str = _server("default", "--reasoning-effort", "str", commands="SC", form="LEVEL",
        example="--reasoning-effort low", env="LLAMA_ARG_REASONING_EFFORT",
        help="how much the model thinks: none, or a level that its template knows, such as low, medium or high; "
        "default = as its template decides")
    reasoning_preserve: bool | None = _server(None, "--reasoning-preserve", "switch", commands="SC",
        negative="--no-reasoning-preserve", example="--reasoning-preserve", env="LLAMA_ARG_REASONING_PRESERVE",
        help="keep the reasoning of earlier turns in the prompt, or drop it, if the template supports that. Default: "
        "as the template does")
    tags: str = _server("", "--tags", "str", form="LIST", example="--tags chat,small", env="LLAMA_ARG_TAGS",
        help="tags of the model in /v1/models, separated by commas; they change nothing")
    spm_infill: bool = _server(False, "--spm-infill", "switch", example="--spm-infill",
        help="begin prompts of /infill with the suffix, as some models expect")
    log_prompts_dir: Path | None = _server(None, "--log-prompts-dir", "path", form="DIR",
        example="--log-prompts-dir prompts",
        help="write every prompt to a file in this folder, for debugging; only its owner can read it")
    reuse_port: bool = _server(False, "--reuse-port", "switch", example="--reuse-port", env="LLAMA_ARG_REUSE_PORT",
        help="let several servers listen on the port; the system distributes connections")
    cors_methods: str = _server("", "--cors-methods", "str", form="LIST", example='--cors-methods "GET, POST"',
        env="LLAMA_ARG_CORS_METHODS",
        help="methods that browsers may use from other origins; default GET, POST, and with several models DELETE")
    cors_headers: str = _server("*", "--cors-headers", "str", form="LIST",
        example='--cors-headers "Content-Type, Authorization"', env="LLAMA_ARG_CORS_HEADERS",
        help="headers that browsers may send from other origins; * = those that they request")
    cors_credentials: bool = _server(True, "--cors-credentials", "switch", negative="--no-cors-credentials",
        example="--no-cors-credentials", env="LLAMA_ARG_CORS_CREDENTIALS",
        help="let browsers send credentials from other origins")
    ui_config: str = _server("", "--ui-config --webui-config", "str", form="JSON",
        example="--ui-config '{\"temperature\": 0.2}'", env="LLAMA_ARG_UI_CONFIG",
        help="initial settings of the web page, as a JSON object (docs/serve.md)")
    ui_config_file: Path | None = _server(None, "--ui-config-file --webui-config-file", "path", form="FILE",
        example="--ui-config-file page.json", env="LLAMA_ARG_UI_CONFIG_FILE",
        help="file with the settings of --ui-config")

    @property
    def only_embeds(self) -> bool:
        """Whether the server generates no text."""
        return self.embeddings or self.reranking

    @property
    def cache_disk_bytes(self) -> int:
        """Return the limit of the folder of --cache-disk."""
        if self.sessions_limit is not None:
            return self.sessions_limit << 20
        return int(self.cache_disk_limit * (1 << 30))

    @property
    def several_models(self) -> bool:
        """Whether a file, a folder or the cache names the models instead of -m."""
        return (
            self.models is not None
            or self.models_preset is not None
            or self.models_dir is not None
            or bool(self.models_cache)
        )
