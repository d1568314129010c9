"""Write the GGUF keys of tokens with a role, and of tokens added before and after a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.convert.card import optional_object
from ikcli.convert.tokenizer_files import CONTROL, Table, TokenizerFiles
from ikcli.errors import FormatError
from ikcli.log import warn
from ikcli.tokenizer.vocab import EOG_TEXTS

_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the spelling of all GGUF files
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_GLM = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_BY_ARCHITECTURE = {"glm4": _GLM, "glm4moe": _GLM, "chatglm": _GLM}
"""Roles that the files of some families do not state."""

# Fill-in-the-middle tokens; readers know these texts too, but a file that states them does not depend on it.
_FILL_IN = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def special_keys(
    files: TokenizerFiles, table: Table, architecture: str, defaults: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the keys of special ids and of added tokens; `defaults` are ids from another file of the checkpoint."""
    find = {text: i for i, text in enumerate(table.texts)}
    find |= {token.text: i for i, token in files.added.items() if i < len(table.texts)}
    ids = {role: find[text] for role, text in _BY_ARCHITECTURE.get(architecture, {}).items() if text in find}
    for role in _NAMED:
        text = files.named_tokens.get(role)
        if text is not None and text in find:
            ids.setdefault(role, find[text])
    ends = _from_configs(files, ids, len(table.texts))
    unknown = files.model.get("unk_token")
    if isinstance(unknown, str) and unknown in find:
        ids.setdefault("unk", find[unknown])
    for role, i in (defaults or {}).items():
        if 0 <= i < len(table.texts):
            ids.setdefault(role, i)
    for role, other in (("bos", "cls"), ("eos", "sep")):
        if role not in ids and other in ids:
            ids[role] = ids[other]
    adds = _added_around(files, ids)
    _further_ends(ids, ends, table)
    for role in ("bos", "eos", "sep"):
        setting = files.settings.get(f"add_{role}_token")
        if isinstance(setting, bool):
            adds[role] = setting
    for role, texts in _FILL_IN.items():
        found = [find[t] for t in texts if t in find and table.types[find[t]] == CONTROL]
        if found:
            ids.setdefault(role, found[0])
    keys: dict[str, Any] = {f"tokenizer.ggml.{_KEYS[role]}": ids[role] for role in _KEYS if role in ids}
    return keys | {f"tokenizer.ggml.add_{role}_token": value for role, value in adds.items()}


def _from_configs(files: TokenizerFiles, ids: dict[str, int], n_tokens: int) -> list[int]:
    """Set ids that config.json and generation_config.json give as numbers; return all that end a text."""
    text = files.config.get("text_config")
    generation = optional_object(files.directory / "generation_config.json")
    ends: list[int] = []
    for config in (files.config, text if isinstance(text, dict) else {}, generation):
        for role in _NAMED:
            value = config.get(f"{role}_token_id")
            if isinstance(value, list) and value:
                ends += [i for i in value if role == "eos" and isinstance(i, int) and 0 <= i < n_tokens]
                value = value[0]
            if not isinstance(value, int) or isinstance(value, bool) or value < 0 or role in ids:
                continue
            if value >= n_tokens:
                warn(
                    f"{files.source}: {role}_token_id {value} is outside the vocabulary of {n_tokens} tokens; left out"
                )
                continue
            ids[role] = value
    return ends


def _further_ends(ids: dict[str, int], ends: list[int], table: Table) -> None:
    """Assign roles to end tokens that readers do not recognise by their texts."""
    for i in dict.fromkeys(ends):
        free = next((role for role in ("eot", "eom") if role not in ids), None)
        if free is not None and i not in ids.values() and table.texts[i] not in EOG_TEXTS.split(" "):
            ids[free] = i


def _added_around(files: TokenizerFiles, ids: dict[str, int]) -> dict[str, bool]:
    """Encode a text to find the tokens that the checkpoint's tokenizer adds; they may reveal bos and eos."""
    if files.fast is None:
        return {}
    try:
        plain = files.fast.encode("a", add_special_tokens=False).ids
        single = files.fast.encode("a").ids
        pair = files.fast.encode("a", "a").ids
    except Exception as problem:  # the library raises bare Exception
        raise FormatError(f"{files.directory / 'tokenizer.json'}: {problem}") from None
    n = len(plain)
    starts = [i for i in range(len(single) - n + 1) if single[i : i + n] == plain] if n else []
    if not starts:
        return {}
    before, after = single[: starts[0]], single[starts[0] + n :]
    adds = {"bos": False, "eos": False}
    if len(before) == 1:
        adds["bos"] = before[0] in (ids.setdefault("bos", before[0]), ids.get("cls"))
    if before and not adds["bos"]:
        what = "several tokens" if len(before) > 1 else "another token than BOS"
        warn(f"{files.source}: tokenizer.json puts {what} before a text; a GGUF file cannot say so and has none")
    if after:
        last, eos = after[-1], ids.setdefault("eos", after[-1])
        if last != eos:
            ids.setdefault("eot", eos)
            ids["eos"] = last
        adds["eos"] = True
    middle = pair[len(before) + n :][: len(pair) - len(single) - n]
    if middle and not after:
        adds["sep"] = middle[0] in (ids.get("sep"), ids.get("eos"))
    elif len(middle) > 1:
        adds["sep"] = middle[1] in (ids.get("sep"), ids.get("eos"))
    return adds
