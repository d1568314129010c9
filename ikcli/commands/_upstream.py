"""Options that exist in the C++ programs only, with the number of values each takes.

They are accepted and reported as "not supported, ignored", so that a pasted command line runs.
"""

from __future__ import annotations

_NO_VALUE = """
--spec-autotune --no-mmproj-offload
--infill -dkvc --dump-kv-cache -dsa --dsa -fidx
--fused-indexer-topk -mtp --multi-token-prediction -no-mtp --no-multi-token-prediction
--defer-experts --prefetch-experts -smf16 --split-mode-f16 -smf32 --split-mode-f32 --perplexity
--all-logits --spm-infill --send-done --webui-mcp-proxy
--ui-mcp-proxy --peg --skip-chat-parsing -ptcall --parallel-tool-calls --adaptive-updt-w-cur --minilog --log-disable
--log-enable --log-new --log-append
"""

_ONE_VALUE = """
-tm --threads-mtmd -td --threads-draft -tbd --threads-batch-draft
-gan --grp-attn-n -gaw --grp-attn-w
--attention -dt
--defrag-thold -mea --max-extra-alloc --cfg-negative-prompt --cfg-negative-prompt-file --cfg-scale
--spec-ckpt-mode --recurrent-ckpt-mode -ns --sequences -ps --p-split
--spec-stage --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
--suffix-pattern-len --suffix-max-depth --suffix-corpus
--mmproj --mmproj-url --mtmd-kq-type --image --audio --image-min-tokens --image-max-tokens
-ictk --indexer-cache-type-k -ctk-first --cache-type-k-first
-ctk-last --cache-type-k-last -ctv-first --cache-type-v-first -ctv-last --cache-type-v-last -mtprot
--mtp-requantize-output-tensor -dsatk --dsa-top-k
--rpc -gfm --gpu-fit-margin -cuda --cuda-params -draft --draft-params
--prefetch-experts-threads -wgt --worst-graph-tokens -fdn --fused-delta-net -grt --graph-reduce-type -gap
--graph-attn-precision -devd --device-draft --allowlist-unicode-rule
--allowlist-pieces --allowlist-keyword --allowlist-keyword-delay --expiring-logit-bias-file -ld --logdir -ptc
--print-token-count
--sql-save-file --sqlite-zstd-ext-file --context-file --chunk-size --chunk-separator --junk
-crs --cache-ram-similarity -cram-n-min --cache-ram-n-min --pos
--log-file
"""

_TWO_VALUES = "--spec-replace"

UPSTREAM_ARITY: dict[str, int] = {
    name: count for count, names in enumerate((_NO_VALUE, _ONE_VALUE, _TWO_VALUES)) for name in names.split()
}
