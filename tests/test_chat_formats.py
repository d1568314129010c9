"""Chat formats: capabilities and families of templates, prompts, constraints on the answer, built-in templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from chat_samples import draw

import ikcli
from ikcli.chat import ChatFormat, RequestError, parse_request
from ikcli.chat.builtin import TEMPLATES, recognise
from ikcli.chat.families.detect import family_by_shape, family_of, reasoning_of
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.grammar.spec import GrammarKind, GrammarSpec, TriggerWatcher
from ikcli.tokenizer import Tokenizer

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools: ' + tools|tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
THINKING = """\
{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>\\n' }}{% endif %}"""
NO_SYSTEM = """\
{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{- '(' + m.role + ')' + m.content }}
{%- endfor %}"""
TYPED = "{% for m in messages %}({{ m.role }}){% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
HARMONY = """\
{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"""
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}


_TOOLS = "{# <tool_call> #}{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
_CALLS = _TOOLS + "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
ITEMS = _CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}){% endfor %}{% endfor %}"
BOTH = (
    _CALLS + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments|tojson }}{% endif %}){% endfor %}{% endfor %}"
)


def render(format: ChatFormat, *messages: Any, **body: Any) -> Any:
    return format.render(parse_request({"messages": list(messages) or [USER], **body}))


def test_a_family_with_tools() -> None:
    format = ChatFormat.for_model(HERMES)
    can = format.capabilities
    assert can.tools and can.tool_calls and can.object_arguments and can.parallel_tool_calls and can.system_role
    assert can.to_props()["supports_tools"] is True
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    answer = render(format, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, tools=TOOLS)
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call>' in answer.prompt
    assert '"name": "g"' in answer.prompt
    assert answer.format == "Hermes 2 Pro"
    assert "<tool_call>" in answer.preserved_tokens


@pytest.mark.parametrize("template", ["chatml", "llama3", "hermes", "items", "both"])
@pytest.mark.parametrize("arguments", ["{x", '{"x": "cut o', "[1]", "7", '"t"', "null", [1], 7, True, "[" * 5000])
def test_calls_whose_arguments_are_no_object_do_not_end_a_conversation(template: str, arguments: Any) -> None:
    """A model wrote them, and the client sends them along with every later request."""
    source = {**TEMPLATES, "hermes": HERMES, "items": ITEMS, "both": BOTH}[template]
    bad = {**CALL, "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "wrong arguments"}
    answer = render(ChatFormat.for_model(source), USER, {"role": "assistant", "tool_calls": [bad]}, result, tools=TOOLS)
    shown = answer.prompt.replace("\\", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert text in shown and "wrong arguments" in shown


def test_text_arguments_stay_as_they_are_where_a_template_takes_them() -> None:
    bad = {**CALL, "function": {"name": "f", "arguments": '{"x": "cut o'}}
    answer = render(ChatFormat.for_model(BOTH), USER, {"role": "assistant", "tool_calls": [bad]}, tools=TOOLS)
    assert answer.prompt.endswith('f({"x": "cut o)')
    answer = render(ChatFormat.for_model(ITEMS), USER, {"role": "assistant", "tool_calls": [bad]}, tools=TOOLS)
    assert answer.prompt.endswith('f(arguments={"x": "cut o,)')
    for empty in ("", " ", None):
        none = {**CALL, "function": {"name": "f", "arguments": empty}}
        answer = render(ChatFormat.for_model(BOTH), USER, {"role": "assistant", "tool_calls": [none]}, tools=TOOLS)
        assert answer.prompt.endswith("f({})")


def test_tokens_and_thoughts_have_the_names_of_transformers() -> None:
    source = (
        "{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}{% for m in messages %}{{ m.thinking }}{% endfor %}"
    )
    format = ChatFormat.for_model(source, bos="<s>", tokens={"pad_token": "<pad>"})
    answer = {"role": "assistant", "content": "a", "reasoning_content": "so"}
    assert render(format, USER, answer, USER).prompt.startswith("<s><pad>Falseso")


def test_optional_calls_are_lazy() -> None:
    grammar = render(ChatFormat.for_model(HERMES), tools=TOOLS).grammar
    assert grammar.lazy and grammar.triggers == ("<tool_call>",)
    assert grammar.reasoning == ("<think>", "</think>")
    assert render(ChatFormat.for_model(HERMES), tools=TOOLS, tool_choice="none").grammar is None


ALL = {"hermes": HERMES, "thinking": THINKING, "no system": NO_SYSTEM, "typed": TYPED, "harmony": HARMONY, **TEMPLATES}


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_required_calls_hold_for_every_template(source: str, choice: Any) -> None:
    answer = render(ChatFormat.for_model(source), tools=TOOLS, tool_choice=choice)
    assert answer.grammar is not None and not answer.grammar.lazy and answer.grammar.tree is not None
    rng = random.Random(3)
    for _ in range(5):
        text = ("thoughts" + answer.grammar.after if answer.grammar.after else "") + draw(answer.grammar.tree, rng)
        parser = answer.parser()
        parser.feed(text)
        message = parser.finish()
        assert message.tool_calls, text
        assert {c.name for c in message.tool_calls} <= ({"g"} if isinstance(choice, dict) else {"f", "g"})


def test_thinking_opened_by_the_prompt() -> None:
    format = ChatFormat.for_model(THINKING, bos="<s>", eos="</s>", add_bos=True)
    answer = render(format)
    assert answer.prompt == "[user]hi</s>[assistant]<think>\n"
    assert answer.thinking_forced_open and format.supports_thinking
    off = render(format, chat_template_kwargs={"enable_thinking": False})
    assert off.prompt.endswith("[assistant]<think>\n</think>")
    assert not off.thinking_forced_open
    held = render(format, response_format={"type": "json_object"}).grammar
    assert held.after == "</think>" and not held.lazy
    gbnf = render(format, grammar='root ::= "a"').grammar
    assert (gbnf.kind, gbnf.source, gbnf.after) == (GrammarKind.GBNF, 'root ::= "a"', "</think>")


def test_thinking_switched_off_in_the_template() -> None:
    answer = render(ChatFormat.for_model(HERMES), reasoning_effort="none")
    assert answer.prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert not answer.thinking_forced_open


def test_json_answers() -> None:
    grammar = render(ChatFormat.for_model("chatml"), response_format={"type": "json_object"}).grammar
    assert grammar == GrammarSpec(GrammarKind.JSON_SCHEMA, schema={"type": "object"})
    thinks = render(ChatFormat.for_model(HERMES), response_format={"type": "json_object"}).grammar
    assert thinks.kind is GrammarKind.TREE and not thinks.after


def test_system_prompts_where_there_is_no_role_for_them() -> None:
    format = ChatFormat.for_model(NO_SYSTEM)
    assert not format.capabilities.system_role
    assert render(format, SYSTEM, USER).prompt == "(user)be brief\nhi"
    assert render(format, SYSTEM).prompt == "(user)be brief"
    assert render(format, {"role": "developer", "content": "x"}, USER).prompt == "(user)x\nhi"


def test_content_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    format = ChatFormat.for_model(TYPED)
    assert format.capabilities.typed_content and not format.capabilities.string_content
    assert render(format, parts).prompt == "(user)a;b;"
    assert render(format, USER).prompt == "(user)hi;"
    assert "a\nb" in render(ChatFormat.for_model("chatml"), parts).prompt


def test_tools_for_templates_that_know_none() -> None:
    format = ChatFormat.for_model("chatml")
    assert format.family.name == "Generic"
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    answer = render(format, SYSTEM, USER, called, result, tools=TOOLS)
    assert answer.prompt.startswith("<|im_start|>system\nbe brief\n\nYou can call these functions")
    assert '{"tool_call": {"name": "f", "arguments": {"x": "y"}}}' in answer.prompt
    assert '{"tool_response": {"tool": "f", "result": "sunny"}}' in answer.prompt
    assert not answer.grammar.lazy
    parser = answer.parser()
    parser.feed('{"response": "all right"}')
    assert parser.finish().content == "all right"
    assert render(format, tools=TOOLS, tool_choice="none").prompt == render(format).prompt


def test_tools_take_few_tokens_where_the_template_knows_none() -> None:
    """A context of 512 has room for some functions and a conversation."""
    fields = gguf.GGUFReader(Path(ikcli.__file__).parent / "data" / "demo.gguf").fields
    tokenizer = Tokenizer.from_metadata({name: field.contents() for name, field in fields.items()}, "demo.gguf")
    text = {"type": "string", "description": "The city and state, for example San Francisco, CA"}
    parameters = {
        "type": "object",
        "properties": {"location": text, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["location"],
    }
    function = {"description": "Get the current weather in a given location", "parameters": parameters}
    tools = [{"type": "function", "function": {"name": f"get_weather_{i}", **function}} for i in range(3)]
    format = ChatFormat.for_model("chatml")
    prompts = [format.render(parse_request({"messages": [USER], "tools": tools[:n]})).prompt for n in range(4)]
    plain, one, _, three = (len(tokenizer.encode(prompt)) for prompt in prompts)
    assert one - plain < 170 and three - plain < 320
    assert "get_weather_2(location: string" in prompts[3]
    assert "San Francisco" in prompts[3] and '"celsius" | "fahrenheit"' in prompts[3]


def test_prefill() -> None:
    start = {"role": "assistant", "content": "I th"}
    answer = render(ChatFormat.for_model("chatml"), USER, start)
    assert answer.prompt.endswith("<|im_start|>assistant\nI th")
    thinking = render(ChatFormat.for_model(THINKING), USER, {**start, "reasoning_content": "hm"})
    assert thinking.prompt.endswith("<think>\nhm</think>I th")
    assert not thinking.thinking_forced_open
    full = render(ChatFormat.for_model("chatml"), USER, start, continue_final_message=False)
    assert full.prompt.endswith("I th<|im_end|>\n<|im_start|>assistant\n")


def test_template_variables() -> None:
    format = ChatFormat.for_model("{{ who }}{{ reasoning_effort }}{{ messages[0].content }}")
    answer = render(format, chat_template_kwargs={"who": "me", "self": 1, "messages": 2}, reasoning_effort="low")
    assert answer.prompt == "melowhi"


def test_a_template_that_refuses() -> None:
    with pytest.raises(RequestError, match="refuses the conversation: never"):
        render(ChatFormat.for_model("{{ raise_exception('never') }}"))
    with pytest.raises(IkError):
        ChatFormat.for_model("{{ raise_exception('never') }}").check()


def test_broken_templates() -> None:
    with pytest.raises(FormatError, match="broken at line 2"):
        ChatFormat.for_model("a\n{% if %}")
    with pytest.raises(FormatError, match='unknown chat template "chatlm"; built-in ones: '):
        ChatFormat.for_model("chatlm")


def test_no_template() -> None:
    format = ChatFormat.for_model(None)
    assert "chatml" in format.notice
    assert render(format).prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_without_jinja() -> None:
    format = ChatFormat.for_model(HERMES, jinja=False)
    assert render(format, SYSTEM).prompt == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(RequestError, match="tools: needs templates"):
        render(format, tools=TOOLS)
    with pytest.raises(UnsupportedError, match="--no-jinja"):
        ChatFormat.for_model("{{ messages }}", jinja=False)


CHAT = [SYSTEM, USER, {"role": "assistant", "content": "yes "}, {"role": "user", "content": "bye"}]
KNOWN = {
    "chatml": "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\nyes <|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n",
    "llama2-sys": "[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhi [/INST]yes </s>[INST] bye [/INST]",
    "llama2": "[INST] be brief\nhi [/INST]yes </s>[INST] bye [/INST]",
    "mistral-v1": " [INST] be brief\n\nhi [/INST] yes </s> [INST] bye [/INST]",
    "mistral-v3": "[INST] be brief\n\nhi[/INST] yes</s>[INST] bye[/INST]",
    "mistral-v3-tekken": "[INST]be brief\n\nhi[/INST]yes </s>[INST]bye[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] be brief[/SYSTEM_PROMPT][INST] hi[/INST] yes </s>[INST] bye[/INST]",
    "gemma": "<start_of_turn>user\nbe brief\n\nhi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
    "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nbye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek3": "be brief\n\n<｜User｜>hi<｜Assistant｜>yes <｜end▁of▁sentence｜><｜User｜>bye<｜Assistant｜>",
    "command-r": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>be brief<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>yes<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "vicuna": "be brief\n\nUSER: hi\nASSISTANT: yes </s>\nUSER: bye\nASSISTANT:",
    "zephyr": "<|system|>\nbe brief<|endoftext|>\n<|user|>\nhi<|endoftext|>\n<|assistant|>\nyes <|endoftext|>\n"
    "<|user|>\nbye"
    "<|endoftext|>\n<|assistant|>\n",
    "openchat": "be brief<|end_of_turn|>GPT4 Correct User: hi<|end_of_turn|>GPT4 Correct Assistant: yes <|end_of_turn|>"
    "GPT4 Correct User: bye<|end_of_turn|>GPT4 Correct Assistant:",
    "bailing": "<role>SYSTEM</role>be brief<role>HUMAN</role>hi<role>ASSISTANT</role>yes <role>HUMAN</role>bye"
    "<role>ASSISTANT</role>",
    "monarch": "system\nbe brief</s>\n<s>user\nhi</s>\n<s>assistant\nyes </s>\n<s>user\nbye</s>\n<s>assistant\n",
}


@pytest.mark.parametrize("name", KNOWN)
def test_built_in_templates(name: str) -> None:
    assert render(ChatFormat.for_model(name), *CHAT).prompt == KNOWN[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_built_in_template_renders(name: str) -> None:
    format = ChatFormat.for_model(name)
    example = format.format_example()
    assert all(text in example for text in ("You are a helpful assistant", "Hello", "Hi there", "How are you?"))


def test_recognising_formats() -> None:
    assert recognise(HERMES) == "chatml"
    assert recognise("{{ '[INST]' }} <<SYS>>") == "llama2-sys"
    assert recognise("nothing") is None


@pytest.mark.parametrize(
    ("marks", "name"),
    [
        ("[TOOL_CALLS]", "Mistral Nemo"),
        ("[TOOL_CALLS] [ARGS]", "Mistral"),
        ("<|channel|> <|message|>", "GPT-OSS"),
        ("<|tool_calls_section_begin|>", "Kimi K2"),
        ("<｜tool▁calls▁begin｜> ```json", "DeepSeek R1"),
        ("<｜tool▁calls▁begin｜>", "DeepSeek V3.1"),
        ("DSML function_calls", "DeepSeek V3.2"),
        ('<|tool_call>call: <tool_call|> <|"|>', "Gemma 4"),
        ("<|role_sep|> <|function_call|>", "GigaChat 3.1"),
        ("<tool_call> <arg_key>", "GLM 4.5"),
        ("<tool_call> <function= <parameter=", "Qwen3 Coder"),
        ("<tool_call>", "Hermes 2 Pro"),
        ("<|start_header_id|> <|python_tag|>", "Llama 3.x"),
        ("<|START_ACTION|>", "Command R7B"),
        ("<|tool_call|>", "Granite"),
        ("<|open|> <|close|>", "Kimi K3"),
        ("<|plamo:begin_tool_requests:plamo|>", "PLaMo 3"),
        ("<|tool_call_start|>\n```python", "MiniCPM 4"),
        ("<function_calls>", "Olmo 3"),
        ("<｜tool_calls_begin｜> <steptml:invoke name=", "Step 3"),
        ("<tool_call> <tool_sep> <arg_key>", "Hunyuan 3"),
        ("{% set S = ':9a' %}{{ '<tool_sep{}>'.format(S) }} <tool_calls{}>", "Hunyuan 3"),
        ("<tool_calls:9a> <tool_call:9a> <arg_key:9a>", "Hunyuan 4"),
        ('{% set S = ":9a" %}{{ "<arg_key{}>".format(S) }} <tool_calls{}>', "Hunyuan 4"),
        ("<dots_function_call>", "dots"),
        ("<tool_calls> <tool_call> ```json", "Hunyuan"),
        ("<tool_calls>", "Apriel"),
        ("<tool_calls> tool_setting=tools", "MiniMax M1"),
        ("]<]minimax[>[ <tool_call> <invoke", "MiniMax M3"),
        ('<function name=" <param name="', "MiniCPM 5"),
    ],
)
def test_families_by_marker(marks: str, name: str) -> None:
    family = family_of(marks)
    assert family is not None and family.name == name


def test_tags_whose_names_have_a_suffix() -> None:
    """Templates put it in by `format`."""
    source = "{%- set HYTK = ':9a' %}{{ '<think{}>'.format(HYTK) }}{{ '<tool_calls{}>'.format(HYTK) }}<arg_key{}>"
    family, (tags, own) = family_of(source), reasoning_of(source)
    assert family is not None and family.openings == ("<tool_calls:9a>",)
    assert own and (tags.open, tags.close) == ("<think:9a>", "</think:9a>")
    assert reasoning_of("<thinking> <think{}>")[0].open == "<think>"


def test_family_by_how_a_call_is_written() -> None:
    shown = 'hi<CALL>[{"name": "probe_function", "arguments": {"probe_key": "probe value"}}]</CALL><end>'
    family = family_by_shape("hi<end>", shown)
    assert family is not None and family.openings == ("<CALL>",)
    assert family_by_shape("hi", "hi there") is None


def watch(spec: GrammarSpec, *pieces: str) -> str | None:
    watcher = TriggerWatcher(spec)
    for piece in pieces:
        if (text := watcher.feed(piece)) is not None:
            return text
    return None


def test_when_a_constraint_begins_to_hold() -> None:
    lazy = GrammarSpec(GrammarKind.TREE, lazy=True, triggers=("<call>",), reasoning=("<t>", "</t>"))
    assert watch(lazy, "text <ca", "ll>\n") == "<call>\n"
    assert watch(lazy, "<t>a <call> b", "</", "t> <call") is None
    assert watch(lazy, "<t>a <call> b", "</", "t> <call", ">x") == "<call>x"
    start = GrammarSpec(GrammarKind.TREE, lazy=True, at_start=('{"name"',))
    assert watch(start, " ", '{"na', 'me": ') == '{"name": '
    assert watch(start, 'x {"name"') is None
    after = GrammarSpec(GrammarKind.TREE, after="</t>")
    assert watch(after, "a<", "/t>", "b") == ""
    assert TriggerWatcher(GrammarSpec(GrammarKind.TREE)).active


def test_identifiers_where_the_template_takes_nine_characters() -> None:
    nemo = "{{ '[TOOL_CALLS]' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    parser = render(ChatFormat.for_model(nemo), tools=TOOLS).parser()
    parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert [len(call.id) for call in parser.finish().tool_calls] == [9]


def test_a_lazy_constraint_waits_for_the_end_of_thinking_that_the_prompt_opened() -> None:
    source = HERMES.replace("<think>\\n\\n</think>\\n\\n", "") + "{{ '<think>' if add_generation_prompt }}"
    grammar = render(ChatFormat.for_model(source), tools=TOOLS).grammar
    assert grammar.lazy and grammar.after == "</think>"
    assert watch(grammar, "<tool_call> no</thi", "nk> yes <tool_call>{") == "<tool_call>{"


def test_results_of_tools_written_out_name_their_function() -> None:
    nameless = {"role": "tool", "content": "x", "tool_call_id": "nobody"}
    answer = render(ChatFormat.for_model("chatml"), USER, nameless, tools=TOOLS)
    assert '{"tool_response": {"result": "x"}}' in answer.prompt


def test_an_answer_in_json_that_could_be_a_call_at_the_start() -> None:
    """Triggers at the start of the answer count behind thoughts and white space, not behind text."""
    start = GrammarSpec(GrammarKind.TREE, lazy=True, at_start=('{"name"',), reasoning=("<t>", "</t>"))
    assert watch(start, "<t>thought</t>\n", '{"name": ') == '{"name": '
    assert watch(start, "text <t>thought</t>\n", '{"name": ') is None


def test_efforts_and_budgets() -> None:
    format = ChatFormat.for_model("{{ reasoning_effort }}|{{ messages[0].content }}")
    assert render(format, reasoning_effort="default").prompt == "|hi"
    assert render(format, reasoning_effort="high").prompt == "high|hi"
    budgets = {value: parse_request({"messages": [USER], "reasoning_budget": value}).thinking for value in (0, 1, -1)}
    assert budgets == {0: False, 1: True, -1: True}
    assert parse_request({"messages": [USER], "reasoning_budget": False}).thinking
