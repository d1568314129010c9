"""Fill-in-the-middle prompts from the special tokens of the vocabulary.

The order is `[BOS] [extra files] PRE prefix SUF suffix MID prompt`; --spm-infill puts the suffix before the prefix.
Models with repository tokens get the extra files as `REP name SEP file name text`. As in llama-server, prefix and
suffix are cut so that the whole fits in a batch.
"""

from __future__ import annotations

from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request, unsupported
from ikcli.server.http.prompts import Prompt, encode
from ikcli.server.http.state import ServerState
from ikcli.tokenizer import Tokenizer


async def prompt_of(state: ServerState, body: dict[str, Any]) -> Prompt:
    """Return the prompt for `input_prefix`, `input_suffix`, `input_extra` and `prompt`.

    Raise ApiError 501 if the model has no such tokens.
    """
    tokenizer = state.engine.tokenizer
    ids = tokenizer.special_ids
    prefix_ids = await _required(tokenizer, body, "input_prefix")
    suffix_ids = await _required(tokenizer, body, "input_suffix")
    prompt = await _plain(tokenizer, f.text("" if body.get("prompt") is None else body["prompt"], "prompt"))
    extra = await _extra(tokenizer, body.get("input_extra"))
    missing = [
        name for name, i in (("prefix", ids.fim_pre), ("suffix", ids.fim_suf), ("middle", ids.fim_mid)) if i is None
    ]
    if missing:
        lacks = " ".join(f"{name} token is missing." for name in missing)
        raise unsupported(f"Infill is not supported by this model: {lacks}")
    n_ctx = state.engine.model.n_ctx_slot
    n_batch = min(state.config.n_batch, n_ctx // 2)
    n_suffix = min(len(suffix_ids), max(0, n_batch // 4 - (2 + len(prompt))))
    n_prefix = min(len(prefix_ids), 3 * (n_batch // 4) - 3)
    front = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    room = max(0, n_ctx - n_batch - 2 * max(state.defaults.n_predict, 0))
    parts = [[ids.fim_pre, *prefix_ids[len(prefix_ids) - n_prefix :]], [ids.fim_suf, *suffix_ids[:n_suffix]]]
    first, second = reversed(parts) if state.config.server.spm_infill else parts
    tokens = [*front, *extra[max(0, len(extra) - room) :], *first, *second, ids.fim_mid, *prompt]
    return Prompt(tuple(tokens), tokenizer.decode(tokens))


async def _required(tokenizer: Tokenizer, body: dict[str, Any], name: str) -> list[int]:
    if body.get(name) is None:
        raise bad_request(f"{name} is required")
    return await _plain(tokenizer, f.text(body[name], name))


async def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize text of the user's file, in which names of control tokens are plain text."""
    return await encode(tokenizer, text, add_special=False, parse_special=False)


async def _extra(tokenizer: Tokenizer, value: Any) -> list[int]:
    files = [] if value is None else [_file(item, i) for i, item in enumerate(f.array(value, "input_extra"))]
    ids = tokenizer.special_ids
    if ids.fim_rep is None or ids.fim_sep is None:
        return [token for _, text in files for token in await _plain(tokenizer, text)]
    out = [ids.fim_rep, *await _plain(tokenizer, "myproject\n")]
    for name, text in files:
        out += [ids.fim_sep, *await _plain(tokenizer, f"{name}\n{text}")]
    return [*out, ids.fim_sep, *await _plain(tokenizer, "filename\n")]


def _file(item: Any, i: int) -> tuple[str, str]:
    entry = f.table(item, f"input_extra[{i}]")
    for key in ("filename", "text"):
        if entry.get(key) is None and (key == "text" or "filename" in entry):
            raise bad_request(f"input_extra[{i}].{key} is required")
    name = f.text(entry.get("filename", "tmp"), f"input_extra[{i}].filename")
    return name, f.text(entry["text"], f"input_extra[{i}].text")
