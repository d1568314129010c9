"""Chat templates: rendering as publishers expect, clear errors, and limits on what a template may do."""

from __future__ import annotations

import resource

import pytest

from ikcli.chat import ChatTemplate, sandbox
from ikcli.errors import FormatError, IkError

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
    assert render("{{ x | tojson(indent='--') }}", x=[1]) == "[\n--1\n]"
    assert render("{{ x | tojson(true, none, [',', ':'], true) }}", x={"b": "é", "a": 1}) == '{"a":1,"b":"\\u00e9"}'


def test_variables_and_helpers() -> None:
    assert render("{{ bos_token }}|{{ x }}", bos_token="<s>", x=1) == "<s>|1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}x{% endgeneration %}y") == "xy"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ tools|tojson }}{{ documents|tojson }}", "nullnull"),
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}|", "|"),
        ("{{ tools is defined }}{{ documents is defined }}", "TrueTrue"),
        ("{% for t in tools or documents or [] %}x{% endfor %}{{ (tools or [])|length }}", "0"),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", "None"),
        ("{{ unk_token is defined }}", "False"),
    ],
)
def test_variables_are_those_of_transformers(source: str, text: str) -> None:
    assert render(source) == text


def test_documents_reach_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert render("{{ documents[0].title }}{% set _ = documents.append(1) %}", documents=documents) == "a"
    assert len(documents) == 1


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{{ 1 | nofilter }}"])
def test_broken_templates(source: str) -> None:
    with pytest.raises(FormatError, match="the chat template is broken at line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].update(x=1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(2000000) %}x{% endfor %}",
        "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
        "{{ range(9999999999999999999999) }}",
        "{{ 'x' * 99999999 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(900) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ 'x'.center(99999999) }}",
        "{{ 'x'|center(99999999) }}",
        "{{ '%99999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ ('{:>99999}' * 999).format(*range(999)) }}",
        "{{ ('%99999d' * 999) % (range(999)|list) }}",
        "{{ ('文' * 9999999)|list|length }}",
        "{{ ('ab,' * 4999999).split(',')|length }}",
        "{{ ('a b ' * 3999999).split()|length }}",
        "{{ '-'.join('文' * 9999999)|length }}",
        "{% set l = range(999999)|list %}",
        "{{ [1, 2, 3]|tojson(separators=('x' * 9999999, ':')) }}",
        "{{ ('a\n' * 9999)|indent('x' * 99999) }}",
        "{{ '{:{}}'.format('x', 99999999) }}",
        "{{ '%99999999d'|format(1) }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
        "{{ ('x' * 9999)|replace('x', 'y' * 9999) }}",
        "{{ (['x' * 9999999] * 9999)|join }}",
        "{{ ('x' * 9999999).join(['a'] * 9999) }}",
        "{{ 'x'|indent(99999999) }}",
        "{{ ('a\n' * 99999)|indent(99999) }}",
        "{{ [1]|batch(99999999, 'x')|list }}",
        "{{ 1.5|round(99999999) }}",
        "{{ 'x'.translate({120: 'y' * 9999}) }}",
        "{{ 'a'.zfill(99999999) }}",
        "{{ ('\t' * 99999).expandtabs(99999) }}",
        "{{ (1).to_bytes(99999999, 'big') }}",
        "{{ strftime_now('%99999999d') }}",
        "{{ lipsum(n=99999) }}",
        "{{ range(9)|sum(start='') }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
        "{% set ns = namespace(s={}) %}{% for i in range(99) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set a = [1] %}{{ a.append(a) }}{{ a|tojson }}",
        "{% set a = [1] %}{{ a.append(a) }}{{ a }}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(999999) %}" + "x" * 999 + "{% endfor %}{% endset %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
        "{% for x in [[1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) }}{% endfor %}",
        "{% for i in range(9999) %}{% if 'b' in 'a' * 999999 %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(9999) %}{{ s.upper()|length }}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in range(9999) %}{{ l|sort|length }}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as x %}",
    ],
)
def test_hostile_templates_fail_with_one_sentence(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IkError, match="the chat template"):
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_formatting_still_works() -> None:
    assert render("{{ '{:>4}|{}'.format(1, 'a') }}{{ '%03d' % 7 }}{{ '%s'|format('b') }}") == "   1|a007b"


@pytest.mark.parametrize(
    "source", ["{{ messages|attr('__class__') }}", "{{ ''['__class__'] }}", "{{ raise_exception.__globals__ }}"]
)
def test_internal_attributes_are_nothing(source: str) -> None:
    assert render(source) == ""


def test_lists_may_grow_but_not_those_of_the_caller() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate("{{ messages.append(1) or messages|length }}").render(messages) == "2"
    assert len(messages) == 1
