"""Chat templates: rendering as publishers expect, clear errors, and limits on what a template may do."""

from __future__ import annotations

import pytest

from ikcli.errors import FormatError, IkError
from ikcli.chat import ChatTemplate

CHATML = """\
{%- for message in messages %}
    {%- if message['role'] == 'bad' %}
        {{- raise_exception('no such role') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}], **variables)  # type: ignore[arg-type]


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_raise_exception() -> None:
    with pytest.raises(IkError, match="refuses the conversation: no such role"):
        ChatTemplate(CHATML).render([{"role": "bad", "content": ""}])


def test_blocks_are_trimmed() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tojson_keeps_characters() -> None:
    assert render("{{ x | tojson }}", x={"a": "<é>"}) == '{"a": "<é>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_variables_and_helpers() -> None:
    assert render("{{ bos_token }}|{{ tools is none }}|{{ x }}", bos_token="<s>", x=1) == "<s>|True|1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}x{% endgeneration %}y") == "xy"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{{ 1 | nofilter }}"])
def test_broken_templates(source: str) -> None:
    with pytest.raises(FormatError, match="the chat template is broken at line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(2000000) %}x{% endfor %}",
        "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
        "{{ range(9999999999999999999999) }}",
        "{{ 'x' * 99999999 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(900) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_hostile_templates_fail_with_one_sentence(source: str) -> None:
    with pytest.raises(IkError, match="the chat template"):
        render(source)
