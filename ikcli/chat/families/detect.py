"""Detect the family of a chat template by the markers in its source, or by how it writes a probe call."""

from __future__ import annotations

import re

from ikcli.chat.families.base import Chars, Family, Reasoning
from ikcli.chat.families.element_calls import ElementCalls
from ikcli.chat.families.gemma import GemmaCalls
from ikcli.chat.families.generic import Generic
from ikcli.chat.families.harmony import Harmony
from ikcli.chat.families.json_calls import JsonCalls, Keys, Llama3, NameKeyCalls
from ikcli.chat.families.python_calls import PythonCalls
from ikcli.chat.families.tagged import DeepSeek, FunctionTag, Hunyuan, KimiK2, MistralArgs, Plamo3, Recipients
from ikcli.chat.families.xml_calls import (
    DEEPSEEK_V3_2,
    DEEPSEEK_V4,
    DOTS,
    GLM_4_5,
    KIMI_K3,
    MINICPM_5,
    MINIMAX,
    QWEN3_CODER,
    SEED_OSS,
    STEP_3,
    XmlCalls,
    hunyuan_3,
    hunyuan_4,
)

KIMI_K3_REASONING = Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>")
_COMMAND_R7B = Keys("tool_name", "parameters", "tool_call_id", Chars(("09",), 1, 3), id_first=True)

_REASONING = (
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>", empty=True),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<mm:think>", "</mm:think>"),
    Reasoning("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    Reasoning("<|thought_start|>", "<|thought_end|>"),
    Reasoning("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    Reasoning("<think>", "</think>"),
)


def _is_kimi_k3(source: str) -> bool:
    return "<|open|>" in source and "<|close|>" in source


def _suffix_of(source: str, tag: str) -> str | None:
    """Return what a tag's name ends in (":opensource" in <think:opensource>), or None if the template has no such tag.

    Templates of Hunyuan 3 and 4 write `'<think{}>'.format(HYTK)`.
    """
    found = re.search(rf"<{tag}(:[^<>\s]{{1,40}}|\{{\}})?>", source)
    if found is None or found[1] != "{}":
        return None if found is None else found[1] or ""
    name = re.search(r"\.format\(\s*(\w+)\s*\)", source)
    value = re.search(rf"set\s+{name[1]}\s*=\s*(['\"])(.*?)\1", source) if name is not None else None
    return None if value is None else value[2]


def reasoning_of(source: str) -> tuple[Reasoning, bool]:
    """Return the texts around reasoning, and whether the template has them (otherwise the usual ones)."""
    if _is_kimi_k3(source):  # macros write the tags
        return KIMI_K3_REASONING, True
    if suffix := _suffix_of(source, "think"):
        return Reasoning(f"<think{suffix}>", f"</think{suffix}>"), True
    for tags in _REASONING:
        if tags.open in source or tags.close in source:
            return tags, True
    return _REASONING[-1], False


def family_of(source: str) -> Family | None:
    """Return the family that the markers in the template identify, or None."""

    def has(*texts: str) -> bool:
        return all(text in source for text in texts)

    if has("[TOOL_CALLS]"):
        if has("[ARGS]"):
            return MistralArgs(call_id=has("[CALL_ID]"))
        return JsonCalls("Mistral Nemo", "[TOOL_CALLS]", array=True, keys=Keys(id="id"))
    if has("<|channel|>", "<|message|>"):
        return Harmony()
    if has("<|tool_call>", "<tool_call|>"):
        return GemmaCalls()
    if has(">>>all"):
        return Recipients()
    if has("<|tool_calls_section_begin|>"):
        return KimiK2()
    if has("<|START_ACTION|>"):
        family: Family = JsonCalls("Command R7B", "<|START_ACTION|>", "<|END_ACTION|>", array=True, keys=_COMMAND_R7B)
        family.dropped = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
        return family
    if _is_kimi_k3(source):
        family = XmlCalls(KIMI_K3)
        family.dropped = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
        return family
    if has("plamo:begin_tool_requests"):
        return Plamo3()
    if has("<|tool_list_start|>") or has("List of tools: ["):
        return PythonCalls()
    if has("<|tool_call_start|>", "```python"):
        return PythonCalls("MiniCPM 4", before="\n```python\n", after="\n```\n", between="\n")
    if has("<function_calls>") and not (has("DSML") or has("<invoke")):
        close = "</function_calls>"
        return PythonCalls("Olmo 3", "<function_calls>", close, before="", after="", between="\n")
    if has("steptml:invoke"):
        return XmlCalls(STEP_3)
    if has("DSML"):
        return XmlCalls(DEEPSEEK_V3_2 if has("function_calls") else DEEPSEEK_V4)
    if has("tool▁calls▁begin"):
        return DeepSeek(fenced=has("```json"))
    return _tagged(source) or _plain(source)


def _tagged(source: str) -> Family | None:
    """Return the family of a template that puts tags around each call, or None."""

    def has(*texts: str) -> bool:
        return all(text in source for text in texts)

    if (suffix := _suffix_of(source, "tool_sep")) is not None:
        return XmlCalls(hunyuan_3(suffix))
    if has(ElementCalls.MARK):
        return ElementCalls()
    if (suffix := _suffix_of(source, "arg_key")) is not None and _suffix_of(source, "tool_calls") is not None:
        return XmlCalls(hunyuan_4(suffix))
    if has("<arg_key>"):
        return XmlCalls(GLM_4_5)
    if has("<seed:tool_call>"):
        return XmlCalls(SEED_OSS)
    if has("<dots_function_call>"):
        return XmlCalls(DOTS)
    if has('<function name="', '<param name="'):
        return XmlCalls(MINICPM_5)
    if has("minimax:tool_call"):
        return XmlCalls(MINIMAX)
    if has("<function=", "<parameter="):
        return XmlCalls(QWEN3_CODER)
    if has("<tool_calls>", "<tool_call>", "```json"):
        return Hunyuan()
    if has("<tool_calls>", "tool_setting=tools"):
        return JsonCalls("MiniMax M1", "<tool_calls>", "</tool_calls>", lines=True)
    if has("<tool_calls>"):
        return JsonCalls("Apriel", "<tool_calls>", "</tool_calls>", array=True)
    if has("<use_mcp_tool>"):
        return None
    if has("<tool_call>"):
        return JsonCalls("Hermes 2 Pro", "<tool_call>", "</tool_call>")
    if has("<function="):
        return FunctionTag()
    if has("<|tool_call|>"):
        close = "<|/tool_call|>" if has("<|/tool_call|>") else ""
        return JsonCalls("Granite", "<|tool_call|>", close, array=True, also=("<tool_call>",))
    if has("<TOOLCALL>"):
        return JsonCalls("Nemotron v2", "<TOOLCALL>", "</TOOLCALL>", array=True)
    if has("<|tools_prefix|>"):
        return NameKeyCalls("Apertus", "<|tools_prefix|>", "<|tools_suffix|>")
    return None


def _plain(source: str) -> Family | None:
    """Return the family of a template without tags of its own, or None."""

    def has(*texts: str) -> bool:
        return all(text in source for text in texts)

    if has("functools["):
        return JsonCalls("FireFunction v2", "functools", array=True, also=(" functools",))
    if has("<|role_sep|>", "<|function_call|>"):
        return JsonCalls("GigaChat 3.1", "<|function_call|>")
    if has("<|role_sep|>", "function call"):
        return JsonCalls("GigaChat", "function call<|role_sep|>")
    if has("<|start_header_id|>") and (has("<|python_tag|>") or has('"parameters"', "tools")):
        return Llama3(builtin_tools=has("<|python_tag|>"))
    if has("Action:", "tool_name"):
        keys = Keys("tool_name", "parameters")
        return JsonCalls("Command R+", "Action: ```json", "```", array=True, keys=keys, also=("Action:```json",))
    return None


_OBJECT = re.compile(r'\{\s*"(?:type|id|name|tool_name|function)"')
_MARK = re.compile(r"(?:</?[^<>\s]{2,40}>|\[/?[A-Z_]{3,30}\])")


def family_by_shape(plain: str, with_call: str) -> Family | None:
    """Return the family of a template that writes calls as JSON between its own markers, or None."""
    n = 0
    while n < min(len(plain), len(with_call)) and plain[n] == with_call[n]:
        n += 1
    tail = with_call[max(0, n - 40) :]
    found = _OBJECT.search(tail, max(0, min(40, n) - 1))
    if not found:
        return None
    head, rest = tail[: found.start()], tail[found.start() :]
    array = head.rstrip().endswith("[")
    before = head.rstrip().removesuffix("[").rstrip()
    opening = next((m.group() for m in reversed(list(_MARK.finditer(before))) if m.end() == len(before)), "")
    closing = _MARK.search(rest)
    keys = Keys(
        "tool_name" if '"tool_name"' in rest else "name", "parameters" if '"parameters"' in rest else "arguments"
    )
    if not opening:
        return None
    return JsonCalls("JSON", opening, closing.group() if closing else "", array=array, keys=keys)


__all__ = ["Generic", "family_by_shape", "family_of", "reasoning_of"]
