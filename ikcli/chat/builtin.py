"""Provide chat templates by name (`--chat-template zephyr`), also in place of a template that is not interpreted.

They follow the formats that model publishers document, with roles and text but without tools.
"""

from __future__ import annotations


def _same(each: str, start: str = "", first: str = "") -> str:
    """Write every message in the same form, then `start` for the answer."""
    return f"{first}{{% for m in messages %}}{each}{{% endfor %}}{{% if add_generation_prompt %}}{start}{{% endif %}}"


def _by_role(system: str, user: str, assistant: str, start: str = "", first: str = "") -> str:
    """Write each role in its own form; roles other than system and assistant count as the user."""
    each = (
        f"{{% if m.role == 'system' %}}{system}{{% elif m.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{user}{{% endif %}}"
    )
    return _same(each, start, first)


def _system_first(user: str, assistant: str, start: str = "", *, trim: bool = False) -> str:
    """Write the system prompt in front of the next user message, for formats without a system role."""
    keep = "m.content|trim" if trim else "m.content"
    each = (
        f"{{% if m.role == 'system' %}}{{% set ns.system = {keep} %}}{{% elif m.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{user}{{% set ns.system = '' %}}{{% endif %}}"
    )
    return _same(each, start, "{% set ns = namespace(system='') %}")


_SYSTEM = "{% if ns.system %}{{ ns.system + '\\n\\n' }}{% endif %}"
_INSIDE = "{% set ns = namespace(inside=false) %}"


def _llama2(system: str, bos: str = "", content: str = "m.content") -> str:
    """Write `[INST] ... [/INST] answer</s>`, with the system prompt inside the first instruction."""
    open_turn = f"{{% if not ns.inside %}}{bos}[INST] {{% set ns.inside = true %}}{{% endif %}}"
    system = system.replace("CONTENT", content)
    each = (
        f"{open_turn}{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{{{{ {content} }}}} [/INST]"
        f"{{% else %}}{{{{ {content} }}}}</s>{{% set ns.inside = false %}}{{% endif %}}"
    )
    return "{% set ns = namespace(inside=true) %}[INST] " + _same(each)


def _mistral(lead: str, trail: str, *, trim: bool = False) -> str:
    """Write the first Mistral formats: system text inside the instruction, `lead` before the markers, `trail` after."""
    answer = "m.content|trim" if trim else "m.content"
    each = (
        f"{{% if not ns.inside %}}{{{{ '{lead}[INST]{trail}' }}}}{{% set ns.inside = true %}}{{% endif %}}"
        "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
        f"{{% elif m.role == 'user' %}}{{{{ m.content + '{lead}[/INST]' }}}}"
        f"{{% else %}}{{{{ '{trail}' + ({answer}) + '</s>' }}}}{{% set ns.inside = false %}}{{% endif %}}"
    )
    return _same(each, first=_INSIDE)


_SYS = "<<SYS>>{{ '\\n' + CONTENT + '\\n' }}<</SYS>>{{ '\\n\\n' }}"
_BAILING = "<role>{{ 'HUMAN' if m.role == 'user' else m.role|upper }}</role>{{ m.content }}"
_DEEPSEEK3 = _by_role(
    "{{ m.content + '\\n\\n' }}",
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}",
    "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>",
    "<｜Assistant｜>",
)

TEMPLATES: dict[str, str] = {
    "chatml": _same(
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}", "{{ '<|im_start|>assistant\\n' }}"
    ),
    "llama2": _llama2("{{ CONTENT + '\\n' }}"),
    "llama2-sys": _llama2(_SYS),
    "llama2-sys-bos": _llama2(_SYS, bos="<s>"),
    "llama2-sys-strip": _llama2(_SYS, content="m.content|trim"),
    "mistral-v1": _mistral(" ", " "),
    "mistral-v3": _mistral("", " ", trim=True),
    "mistral-v3-tekken": _mistral("", ""),
    "mistral-v7": _by_role(
        "[SYSTEM_PROMPT] {{ m.content }}[/SYSTEM_PROMPT]",
        "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}",
        " {{ m.content }}</s>",
    ),
    "phi3": _same("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}", "{{ '<|assistant|>\\n' }}"),
    "phi4": _same(
        "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}", "<|im_start|>assistant<|im_sep|>"
    ),
    "falcon3": _same("{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}", "{{ '<|assistant|>\\n' }}"),
    "falcon_e": _same("{{ m.role + m.content + '\\n' }}", "{{ 'assistant\\n' }}"),
    "zephyr": _same("{{ '<|' + m.role + '|>\\n' + m.content + '<|endoftext|>\\n' }}", "{{ '<|assistant|>\\n' }}"),
    "monarch": _same(
        "{{ ('' if loop.first else '<s>') + m.role + '\\n' + m.content + '</s>\\n' }}", "{{ '<s>assistant\\n' }}"
    ),
    "gemma": _system_first(
        "{{ '<start_of_turn>' + m.role + '\\n' }}" + _SYSTEM + "{{ m.content|trim + '<end_of_turn>\\n' }}",
        "{{ '<start_of_turn>model\\n' + m.content|trim + '<end_of_turn>\\n' }}",
        "{{ '<start_of_turn>model\\n' }}",
        trim=True,
    ),
    "orion": _system_first("Human: " + _SYSTEM + "{{ m.content + '\\n\\nAssistant: </s>' }}", "{{ m.content }}</s>"),
    "openchat": _same(
        "{% if m.role != 'system' %}GPT4 Correct {{ m.role[:1]|upper + m.role[1:] }}: {% endif %}"
        "{{ m.content }}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "vicuna": _by_role(
        "{{ m.content + '\\n\\n' }}",
        "USER: {{ m.content + '\\n' }}",
        "ASSISTANT: {{ m.content + '</s>\\n' }}",
        "ASSISTANT:",
    ),
    "vicuna-orca": _by_role(
        "SYSTEM: {{ m.content + '\\n' }}",
        "USER: {{ m.content + '\\n' }}",
        "ASSISTANT: {{ m.content + '</s>\\n' }}",
        "ASSISTANT:",
    ),
    "deepseek": _by_role(
        "{{ m.content }}",
        "{{ '### Instruction:\\n' + m.content + '\\n' }}",
        "{{ '### Response:\\n' + m.content + '\\n<|EOT|>\\n' }}",
        "{{ '### Response:\\n' }}",
    ),
    "deepseek2": _by_role(
        "{{ m.content + '\\n\\n' }}",
        "User: {{ m.content + '\\n\\n' }}",
        "Assistant: {{ m.content }}<｜end▁of▁sentence｜>",
        "Assistant:",
    ),
    "deepseek3": _DEEPSEEK3,
    "deepseek4": _DEEPSEEK3,
    "command-r": _same(
        "<|START_OF_TURN_TOKEN|>"
        "{{ {'system': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}.get(m.role, '<|USER_TOKEN|>') }}"
        "{{ m.content|trim }}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "llama3": _same(
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' }}",
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
    ),
    "llama4": _same(
        "{{ '<|header_start|>' + m.role + '<|header_end|>\\n\\n' + m.content|trim + '<|eot|>' }}",
        "{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}",
    ),
    "chatglm3": _same("{{ '<|' + m.role + '|>\\n ' + m.content }}", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _same("{{ '<|' + m.role + '|>\\n' + m.content }}", "<|assistant|>", "[gMASK]<sop>"),
    "minicpm": _same(
        "{% if m.role == 'user' %}<用户>{{ m.content|trim }}<AI>{% else %}{{ m.content|trim }}{% endif %}"
    ),
    "exaone3": _by_role(
        "[|system|]{{ m.content|trim + '[|endofturn|]\\n' }}",
        "[|user|]{{ m.content|trim + '\\n' }}",
        "[|assistant|]{{ m.content|trim + '[|endofturn|]\\n' }}",
        "[|assistant|]",
    ),
    "rwkv-world": _same(
        "{% if m.role == 'user' %}User: {{ m.content + '\\n\\nAssistant:' }}"
        "{% else %}{{ m.content + '\\n\\n' }}{% endif %}"
    ),
    "granite": _same(
        "<|start_of_role|>{{ m.role }}<|end_of_role|>"
        "{% if m.role == 'assistant_tool_call' %}<|tool_call|>{% endif %}{{ m.content + '<|end_of_text|>\\n' }}",
        "{{ '<|start_of_role|>assistant<|end_of_role|>\\n' }}",
    ),
    "gigachat": _by_role(
        "{% if loop.first %}{{ m.content }}<|message_sep|>{% endif %}",
        "{% if m.role == 'user' %}user<|role_sep|>{{ m.content }}<|message_sep|>"
        "available functions<|role_sep|>[]<|message_sep|>{% endif %}",
        "assistant<|role_sep|>{{ m.content }}<|message_sep|>",
        "assistant<|role_sep|>",
        "<s>",
    ),
    "megrez": _same(
        "<|role_start|>{{ m.role }}<|role_end|>{{ m.content }}<|turn_end|>", "<|role_start|>assistant<|role_end|>"
    ),
    "hunyuan-moe": _by_role(
        "<|startoftext|>{{ m.content }}<|extra_4|>",
        "<|startoftext|>{{ m.content }}<|extra_0|>",
        "<|startoftext|>{{ m.content }}<|eos|>",
    ),
    "kimi-k2": _by_role(
        "<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "kimi-k3": _same(
        '<|open|>message role="{{ m.role }}"<|sep|>'
        "{% if m.role == 'assistant' %}<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
        "{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>",
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
    ),
    "gpt-oss": _same(
        "<|start|>{{ m.role }}<|message|>{{ m.content }}{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}",
        "<|start|>assistant",
    ),
    "bitnet": _by_role(
        "System: {{ m.content }}",
        "{% if m.role == 'user' %}User: {{ m.content }}<|eot_id|>Assistant: {% else %}{{ m.content }}{% endif %}",
        "{{ m.content }}",
    ),
    "grok-2": _by_role(
        "System: {{ m.content|trim + '<|separator|>\\n\\n' }}",
        "Human: {{ m.content|trim + '<|separator|>\\n\\n' }}",
        "Assistant: {{ m.content + '<|separator|>\\n\\n' }}",
        "Assistant:",
    ),
    "bailing": _same(_BAILING, "<role>ASSISTANT</role>"),
    "bailing-think": _same(_BAILING, "<role>ASSISTANT</role><think>"),
    "bailing2": "{% if not messages or messages[0].role != 'system' %}"
    "<role>SYSTEM</role>detailed thinking off<|role_end|>{% endif %}"
    + _same(_BAILING + "<|role_end|>", "<role>ASSISTANT</role>"),
    "seed_oss": _same(
        "<seed:bos>{{ m.role + '\\n' + (m.content|trim if m.role == 'assistant' else m.content) }}<seed:eos>",
        "<seed:bos>{{ 'assistant\\n' }}",
    ),
    "dots1": _by_role(
        "<|system|>{{ m.content }}<|endofsystem|>",
        "<|userprompt|>{{ m.content }}<|endofuserprompt|>",
        "<|response|>{{ m.content }}<|endofresponse|>",
        "<|response|>",
    ),
}
"""Jinja2 source by name."""

ALIASES = {
    "llama-3": "llama3",
    "mistral": "mistral-v7",
    "gemma2": "gemma",
    "smolvlm": "chatml",
    "phi-3": "phi3",
    "exaone4": "exaone3",
}

# Texts that identify the format of a template; the first line whose texts all occur wins.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("phi4", ("<|im_start|>", "<|im_sep|>")),
    ("chatml", ("<|im_start|>",)),
    ("mistral-v7", ("[INST]", "[SYSTEM_PROMPT]")),
    ("mistral-v1", ("' [INST] ' + system_message",)),
    ("mistral-v1", ("[AVAILABLE_TOOLS]", " [INST]")),
    ("mistral-v3-tekken", ("[AVAILABLE_TOOLS]", '"[INST]"')),
    ("mistral-v3", ("[AVAILABLE_TOOLS]", "[INST]")),
    ("llama2-sys-strip", ("[INST]", "content.strip()")),
    ("llama2-sys-bos", ("bos_token + '[INST]",)),
    ("llama2-sys", ("[INST]", "<<SYS>>")),
    ("llama2", ("[INST]",)),
    ("chatglm3", ("[gMASK]sop",)),
    ("chatglm4", ("[gMASK]<sop>",)),
    ("phi3", ("<|assistant|>", "<|end|>")),
    ("zephyr", ("<|user|>", "<|endoftext|>")),
    ("falcon3", ("<|assistant|>", "<|user|>")),
    ("monarch", ("bos_token + message['role']",)),
    ("gemma", ("<start_of_turn>",)),
    ("orion", ("'\\n\\nAssistant: ' + eos_token",)),
    ("openchat", ("GPT4 Correct ",)),
    ("vicuna-orca", ("USER: ", "ASSISTANT: ", "SYSTEM: ")),
    ("vicuna", ("USER: ", "ASSISTANT: ")),
    ("deepseek", ("### Instruction:", "<|EOT|>")),
    ("command-r", ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>")),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("minicpm", ("<用户>",)),
    ("deepseek2", ("'Assistant: ' + message['content'] + eos_token",)),
    ("deepseek3", ("<｜Assistant｜>", "<｜User｜>")),
    ("exaone3", ("[|system|]", "[|assistant|]", "[|endofturn|]")),
    ("rwkv-world", ("rwkv-world",)),
    ("granite", ("<|start_of_role|>",)),
    ("gigachat", ("<|role_sep|>", "<|message_sep|>")),
    ("gigachat", ("additional_special_tokens[0]", "additional_special_tokens[1]")),
    ("megrez", ("<|role_start|>",)),
    ("bailing2", ("<role>ASSISTANT</role>", "<role>HUMAN</role>", "<|role_end|>")),
    ("bailing-think", ("<role>ASSISTANT</role>", '"HUMAN"', "<think>")),
    ("bailing", ("<role>ASSISTANT</role>", "HUMAN")),
    ("llama4", ("<|header_start|>", "<|header_end|>")),
    ("dots1", ("<|endofuserprompt|>",)),
    ("hunyuan-moe", ("<|startoftext|>", "<|extra_4|>")),
    ("kimi-k3", ("<|open|>", "<|close|>", "<|end_of_msg|>")),
    ("kimi-k2", ("<|im_middle|>", "<|im_end|>")),
    ("grok-2", ("<|separator|>", "'Assistant: '")),
    ("gpt-oss", ("<|start|>", "<|channel|>")),
    ("seed_oss", ("<seed:bos>",)),
)


def by_name(name: str) -> str | None:
    """Return the template called `name`, or None."""
    return TEMPLATES.get(ALIASES.get(name, name))


def recognise(source: str) -> str | None:
    """Return the name of the template whose format `source` has, or None."""
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)
