"""Texts for chat tests: what models of each family write, and texts drawn from a constraint tree."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikcli.chat.families.base import Family, Reasoning
from ikcli.chat.families.element_calls import ElementCalls
from ikcli.chat.families.gemma import GemmaCalls
from ikcli.chat.families.generic import Generic
from ikcli.chat.families.harmony import Harmony
from ikcli.chat.families.json_calls import JsonCalls, Keys, Llama3, NameKeyCalls
from ikcli.chat.families.python_calls import PythonCalls
from ikcli.chat.families.tagged import DeepSeek, FunctionTag, Hunyuan, KimiK2, MistralArgs, Plamo3, Recipients
from ikcli.chat.families.xml_calls import (
    DEEPSEEK_V3_2,
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
from ikcli.chat.messages import Tool
from ikcli.grammar.spec import Chars, Choice, Literal, Marker, Node, Repeat, Schema, Sequence, Until

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = Tool("clock", "", {"type": "object", "properties": {}})
TOOLS = (WEATHER, CLOCK)
SCHEMAS: Mapping[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in TOOLS}
THINK = Reasoning("<think>", "</think>")


@dataclass(frozen=True)
class Sample:
    """A family, an answer of its models, and what it means: content, reasoning, calls by name and arguments."""

    family: Family
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


HERMES = JsonCalls("Hermes", "<tool_call>", "</tool_call>")
NEMO = JsonCalls("Nemo", "[TOOL_CALLS]", array=True, keys=Keys(id="id"))
R7B = JsonCalls(
    "R7B", "<|START_ACTION|>", "<|END_ACTION|>", array=True,
    keys=Keys("tool_name", "parameters", "tool_call_id", Chars(("09",), 1, 3), id_first=True),
)  # fmt: skip
R7B.dropped = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
K3 = XmlCalls(KIMI_K3)
K3.dropped = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
OLMO_3 = PythonCalls("Olmo 3", "<function_calls>", "</function_calls>", before="", after="", between="\n")
MINICPM_4 = PythonCalls("MiniCPM 4", before="\n```python\n", after="\n```\n", between="\n")
PARIS = ("get_weather", {"city": "Paris"})
ROME2 = ("get_weather", {"city": 'Rome "é"\n', "days": 2})
TIME = ("clock", {})

_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome \"é\"\n\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
_GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
    "<tool_call>clock\n</tool_call>"
)
_DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
_MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
_DOTS = _MINIMAX.replace("minimax:tool_call", "dots_function_call")
_STEP_3 = (
    '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
    '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="clock">\n</steptml:invoke><｜tool_call_end｜>'
    "<｜tool_calls_end｜>"
)
_MINICPM_5 = (
    '<function name="get_weather"><param name="city">Paris</param></function>\n<function name="clock"></function>'
)
_HUNYUAN_3 = (
    '<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome "é"\n</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock<tool_sep></tool_call></tool_calls>"
)
_HUNYUAN_4 = (
    '<tool_calls:9a>\n<tool_call:9a>get_weather\n<arg_key:9a>city</arg_key:9a><arg_value:9a>Rome "é"\n</arg_value:9a>\n'
    "<arg_key:9a>days</arg_key:9a>\n<arg_value:9a>2</arg_value:9a></tool_call:9a><tool_call:9a>clock</tool_call:9a>\n"
    "</tool_calls:9a>"
)
_KIMI_K3 = (
    'Sure.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
)
_M3 = (
    '#<tool_call>\n#<invoke name="get_weather">#<city>Rome "é"\n#</city>\n#<days>2#</days>\n#</invoke>\n'
    '#<invoke name="clock">#</invoke>\n#</tool_call>'
).replace("#", ElementCalls.MARK)
_M3_NESTED = (
    '#<tool_call>#<invoke name="other">#<a>#<item>1#</item>#<item>#<b>x#</b>#<c>true#</c>#</item>#</a>'
    "#<d>5 < 6 </d>#</d>#</invoke>#</tool_call>"
).replace("#", ElementCalls.MARK)
_PLAMO_3 = (
    "{b}requests{e}{b}request{e}{b}name{e}get_weather{x}name{e}{b}arguments{e}<|plamo:constrain|>json<|plamo:msg|>"
    '{{"city": "Paris"}}{x}arguments{e}{x}request{e}{b}request{e}{b}name{e}clock{x}name{e}{b}arguments{e}'
    "<|plamo:constrain|>json<|plamo:msg|>{{}}{x}arguments{e}{x}request{e}{x}requests{e}"
).format(b="<|plamo:begin_tool_", x="<|plamo:end_tool_", e=":plamo|>")
_HARMONY = (
    "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Paris"}'
)

SAMPLES = (
    Sample(HERMES, "Just text.\n\nMore <b>", "Just text.\n\nMore <b>"),
    Sample(HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
           calls=(PARIS,)),
    Sample(
        HERMES,
        'I look. \n<tool_call>\n{"name":"get_weather","arguments":{"city":"Rome \\"\\u00e9\\"\\n","days":2}}\n'
        '</tool_call>\n<tool_call>{"arguments": {}, "name": "clock"}</tool_call>\n',
        "I look.", calls=(ROME2, TIME),
    ),
    Sample(
        HERMES,
        '<think>\nHm <tool_call> no\n</think>\n\nYes.<tool_call>{"name": "clock"}</tool_call>',
        "Yes.", "Hm <tool_call> no", (TIME,),
    ),
    Sample(HERMES, "<tool_call> is a tag, {", "<tool_call> is a tag, {"),
    Sample(HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
    Sample(HERMES, "<tool_ca", "<tool_ca"),
    Sample(NEMO, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefgh1"}, '
           '{"name": "clock", "arguments": {}, "id": "abcdefgh2"}]', calls=(PARIS, TIME)),
    Sample(R7B, '<|START_RESPONSE|>Hi<|END_RESPONSE|>', "Hi"),
    Sample(R7B, '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
           '{"city": "Paris"}}\n]<|END_ACTION|>', calls=(PARIS,)),
    Sample(Llama3(builtin_tools=True), '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    Sample(Llama3(builtin_tools=True), '{"type": "function", "name": "clock", "parameters": {}}', calls=(TIME,)),
    Sample(Llama3(builtin_tools=True), '{"name": "nobody", "age": 3}', '{"name": "nobody", "age": 3}'),
    Sample(Llama3(builtin_tools=True), '<|python_tag|>get_weather.call(city="Paris")', calls=(PARIS,)),
    Sample(Llama3(builtin_tools=True), "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Sample(JsonCalls("M1", "<tool_calls>", "</tool_calls>", lines=True),
           '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "clock", "arguments": {}}\n'
           "</tool_calls>", calls=(PARIS, TIME)),
    Sample(NameKeyCalls("A", "<|tools_prefix|>", "<|tools_suffix|>"),
           '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"clock": {}}]<|tools_suffix|>', calls=(PARIS, TIME)),
    Sample(DeepSeek(fenced=True), _V3, calls=(PARIS, TIME)),
    Sample(DeepSeek(fenced=False), "<think>x</think>Right." + _V31, "Right.", "x", (PARIS,)),
    Sample(KimiK2(), '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0'
           '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>', calls=(PARIS,)),
    Sample(MistralArgs(call_id=True), 'Ok[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{"city": "Paris"}'
           "[TOOL_CALLS]clock[ARGS]{}", "Ok", calls=(PARIS, TIME)),
    Sample(FunctionTag(), '<function=get_weather>{"city": "Paris"}</function>', calls=(PARIS,)),
    Sample(FunctionTag(), "<function=x> is no call", "<function=x> is no call"),
    Sample(Recipients(), 'all\nHello.\n>>>get_weather\n{"city": "Paris"}', "Hello.", calls=(PARIS,)),
    Sample(Recipients(), 'clock\n{}', calls=(TIME,)),
    Sample(Recipients(), "Hello", "Hello"),
    Sample(XmlCalls(QWEN3_CODER), "Look:\n" + _QWEN, "Look:", calls=(ROME2,)),
    Sample(XmlCalls(QWEN3_CODER), "<tool_call>\n<function=clock>\n</function>\n</tool_call>", calls=(TIME,)),
    Sample(XmlCalls(QWEN3_CODER), "<tool_call> or <function= what", "<tool_call> or <function= what"),
    Sample(XmlCalls(SEED_OSS), _QWEN.replace("tool_call", "seed:tool_call"), calls=(ROME2,)),
    Sample(XmlCalls(SEED_OSS), "<seed:tool_call>\n<function=get_weather>\n<parameter=x>{'a': "
           "[True, None]}</parameter>\n<parameter=y>{'a'</parameter>\n</function>\n</seed:tool_call>",
           calls=(("get_weather", {"x": {"a": [True, None]}, "y": "{'a'"}),)),
    Sample(XmlCalls(GLM_4_5), _GLM, calls=(PARIS, TIME)),
    Sample(XmlCalls(DEEPSEEK_V3_2), _DSML, calls=(("get_weather", {"city": "Paris", "days": 2}), TIME)),
    Sample(XmlCalls(MINIMAX), _MINIMAX, calls=(PARIS,)),
    Sample(XmlCalls(DOTS), "Hm.\n" + _DOTS, "Hm.", calls=(PARIS,)),
    Sample(XmlCalls(STEP_3), _STEP_3, calls=(PARIS, TIME)),
    Sample(XmlCalls(MINICPM_5), "Ok.\n" + _MINICPM_5, "Ok.", calls=(PARIS, TIME)),
    Sample(XmlCalls(hunyuan_3("")), _HUNYUAN_3, calls=(ROME2, TIME)),
    Sample(XmlCalls(hunyuan_3(":9a")), "<tool_calls:9a><tool_call:9a>clock<tool_sep:9a></tool_call:9a></tool_calls:9a>",
           calls=(TIME,)),
    Sample(XmlCalls(hunyuan_4(":9a")), _HUNYUAN_4, calls=(ROME2, TIME)),
    Sample(Hunyuan(), 'Yes.<tool_calls><tool_call>get_weather\n```json\n{"city": "Paris"}\n```</tool_call>\n'
           "<tool_call>clock\n```json\n{}\n```</tool_call></tool_calls>", "Yes.", calls=(PARIS, TIME)),
    Sample(Hunyuan(), '<tool_calls>[{"name": "clock", "arguments": {}}]</tool_calls>', calls=(TIME,)),
    Sample(ElementCalls(), "Hm. " + _M3, "Hm.", calls=(ROME2, TIME)),
    Sample(ElementCalls(), _M3_NESTED, calls=(("other", {"a": [1, {"b": "x", "c": True}], "d": "5 < 6 </d>"}),)),
    Sample(ElementCalls(), ElementCalls.OPEN + " no", ElementCalls.OPEN + " no"),
    Sample(K3, _KIMI_K3, "Sure.", calls=(("get_weather", {"city": "Paris", "days": 2}), TIME)),
    Sample(K3, "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>", "Hi"),
    Sample(Plamo3(), "Look." + _PLAMO_3 + "<|plamo:tag|>", "Look.", calls=(PARIS, TIME)),
    Sample(Plamo3(), "<|plamo:begin_tool_requests:plamo|>?", "<|plamo:begin_tool_requests:plamo|>?"),
    Sample(OLMO_3, '<function_calls>get_weather(city="Paris")\nclock()</function_calls>', calls=(PARIS, TIME)),
    Sample(OLMO_3, "<function_calls>x = 1</function_calls>", "<function_calls>x = 1</function_calls>"),
    Sample(MINICPM_4, "A.\n<|tool_call_start|>\n```python\nget_weather(city='Rome \"é\"\\n', days=2)\nclock()\n```\n"
           "<|tool_call_end|>", "A.", calls=(ROME2, TIME)),
    Sample(Harmony(), _HARMONY, reasoning="think", calls=(PARIS,)),
    Sample(Harmony(), "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
           "b", "a"),
    Sample(Harmony(), "no header", "no header"),
    Sample(PythonCalls(), '<|tool_call_start|>[get_weather(city="Paris"), clock()]<|tool_call_end|>',
           calls=(PARIS, TIME)),
    Sample(PythonCalls(), "<|tool_call_start|>[1+1]<|tool_call_end|>", "<|tool_call_start|>[1+1]<|tool_call_end|>"),
    Sample(GemmaCalls(), 'Ok.<|tool_call>call:get_weather{city:<|"|>Rome "é"\n<|"|>,days:2}<tool_call|>'
           '<|tool_call>call:clock{}<tool_call|>', "Ok.", calls=(ROME2, TIME)),
    Sample(GemmaCalls(), '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,x:{a:[1,<|"|>}<|"|>,true],'
           '<|"|>b c<|"|>:null}}',
           calls=(("get_weather", {"city": "Paris", "x": {"a": [1, "}", True], "b c": None}}),)),
    Sample(GemmaCalls(), "<|tool_call>call:clock", "<|tool_call>call:clock"),
    Sample(Generic(), '{"tool_call": {"name": "get_weather", "arguments": {"city": "Paris"}}}', calls=(PARIS,)),
    Sample(Generic(), '{"response": "Hi \\ud83d\\ude00\\n\\"you\\""}', 'Hi 😀\n"you"'),
    Sample(Generic(), '{"response": {"a": [1]}}', '{"a": [1]}'),
    Sample(Generic(), '{"other": 1}', '{"other": 1}'),
)  # fmt: skip
FAMILIES = tuple({sample.family.name: sample.family for sample in SAMPLES}.values())


def draw(node: Node, rng: random.Random) -> str:
    """A text that `node` accepts."""
    if isinstance(node, Literal | Marker):
        return node.text
    if isinstance(node, Sequence):
        return "".join(draw(part, rng) for part in node.parts)
    if isinstance(node, Choice):
        return draw(rng.choice(node.options), rng)
    if isinstance(node, Repeat):
        n = rng.randint(node.least, node.most if node.most is not None else node.least + 2)
        between = draw(node.between, rng) if node.between else ""
        return between.join(draw(node.part, rng) for _ in range(n))
    if isinstance(node, Until):
        return "plain text" + node.end
    if isinstance(node, Chars):
        return "".join(rng.choice(rng.choice(node.ranges)) for _ in range(rng.randint(node.least, min(node.most, 9))))
    assert isinstance(node, Schema)
    return json.dumps(value_of(node.schema, rng), ensure_ascii=False)


def value_of(schema: Any, rng: random.Random) -> Any:
    """A value that a simple schema accepts."""
    if schema.get("type") == "object":
        required = schema.get("required", [])
        return {
            k: value_of(v, rng) for k, v in schema.get("properties", {}).items() if k in required or rng.random() < 0.5
        }
    return {"string": 'a "b" </x>\n{', "integer": 3}.get(schema.get("type"))
