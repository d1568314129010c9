"""Small templates write calls as those of models do: what they write is read as the same calls, whole or streamed."""

from __future__ import annotations

import json

import pytest
from test_chat_parser import read, same

from ikcli.chat import ChatFormat, ChatParser, parse_request
from ikcli.chat.families.detect import reasoning_of

_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_TEXT = "{{ v if v is string else v|tojson }}"
_JSON = "{{ c.function.arguments|tojson }}"
CALLS = {  # around all calls, and of one call `c`
    "Kimi K3": (
        "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        '<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>' + _ITEMS
        + "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\"<|sep|>" + _TEXT
        + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>",
    ),
    "MiniMax M3": (
        "]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>",
        ']<]minimax[>[<invoke name="{{ c.function.name }}">' + _ITEMS + "]<]minimax[>[<{{ k }}>" + _TEXT
        + "]<]minimax[>[</{{ k }}>\n{% endfor %}]<]minimax[>[</invoke>\n",
    ),
    "Hunyuan": (
        "<tool_calls>", "</tool_calls>",
        "<tool_call>{{ c.function.name }}\n```json\n" + _JSON + "\n```</tool_call>\n",
    ),
    "Hunyuan 3": (
        "<tool_calls>\n", "</tool_calls>",
        "<tool_call>{{ c.function.name }}<tool_sep>\n" + _ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _TEXT
        + "</arg_value>\n{% endfor %}</tool_call>\n",
    ),
    "Hunyuan 4": (
        "<tool_calls>\n", "</tool_calls>",
        "<tool_call>{{ c.function.name }}\n" + _ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + _TEXT
        + "</arg_value>\n{% endfor %}</tool_call>\n",
    ),
    "Step 3": (
        "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ c.function.name }}">' + _ITEMS
        + '<steptml:parameter name="{{ k }}">' + _TEXT
        + "</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜>",
    ),
    "PLaMo 3": (
        "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>",
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{{ c.function.name }}"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>" + _JSON
        + "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    ),
    "Olmo 3": (
        "<function_calls>", "</function_calls>",
        "{{ c.function.name }}(" + _ITEMS + "{{ k }}={{ v|tojson }}{{ ', ' if not loop.last }}{% endfor %})\n",
    ),
    "MiniCPM 4": (
        "<|tool_call_start|>\n```python\n", "```\n<|tool_call_end|>",
        "{{ c.function.name }}(" + _ITEMS + "{{ k }}={{ v|tojson }}{{ ',' if not loop.last }}{% endfor %})\n",
    ),
    "MiniCPM 5": (
        "", "",
        '<function name="{{ c.function.name }}">' + _ITEMS + '<param name="{{ k }}">' + _TEXT
        + "</param>{% endfor %}</function>\n",
    ),
    "dots": (
        "<dots_function_call>\n", "</dots_function_call>",
        '<invoke name="{{ c.function.name }}">\n' + _ITEMS + '<parameter name="{{ k }}">' + _TEXT
        + "</parameter>\n{% endfor %}</invoke>\n",
    ),
}  # fmt: skip
ARGUMENTS = ({"city": 'Rome "é" <b>\n&', "days": 2}, {"city": "Oslo"})
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_come_back(name: str) -> None:
    before, after, call = CALLS[name]
    template = (
        "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}<<{{ m.role }}>>{{ m.content or '' }}"
        f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}<<assistant>>{% endif %}"
    )
    chat = ChatFormat.for_model(template)
    assert chat.family.name == name
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
        for i, arguments in enumerate(ARGUMENTS)
    ]
    prompt = chat.render(
        parse_request({
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "Look.\n", "tool_calls": calls},
                *({"role": "tool", "tool_call_id": c["id"], "content": "sun"} for c in calls),
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
        })
    )  # fmt: skip
    answer = prompt.prompt.partition("<<assistant>>")[2].partition("<<tool>>")[0]
    assert "weather" in answer and prompt.format == name
    for pieces in ([answer], list(answer)):
        message, deltas = read(ChatParser(prompt.settings), pieces)
        assert message.content == "Look." and same(message, deltas)
        assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("weather", a) for a in ARGUMENTS]


@pytest.mark.parametrize(
    ("source", "opening"),
    [
        ("{{ '<|open|>' + tag + '<|sep|>' }} {{ '<|close|>' }}", "<|open|>think<|sep|>"),
        ("{{- '<mm:think>' }}", "<mm:think>"),
        ("<|plamo:end_think:plamo|>", "<|plamo:begin_think:plamo|>"),
        ("<|thought_start|>", "<|thought_start|>"),
        ("</think>", "<think>"),
    ],
)
def test_tags_of_reasoning(source: str, opening: str) -> None:
    tags, known = reasoning_of(source)
    assert known and tags.open == opening
