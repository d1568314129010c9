"""JSON with long strings: parsed as without the shortcut, with the same errors."""

from __future__ import annotations

import json

import pytest

from ikcli.server.http.jsontext import parse
from ikcli.server.http.long_strings import LongStrings

LONG = "data:image/png;base64," + "iVBORw0KGgo+/" * 40_000


@pytest.mark.parametrize(
    ("value", "cut"),
    [
        ({"messages": [{"url": LONG}, {"url": LONG[:-7]}], "n": 1}, 2),
        ([LONG, {"images": [LONG, LONG]}], 3),
        ({"say": f'"{LONG}"', "url": LONG}, 1),  # escaped quotes around the first
        ({"text": "line\n" + LONG}, 0),
        ({"text": LONG + "é"}, 0),
        ({LONG: 1, "url": LONG}, 2),  # a name is no value, so all is parsed again
        (LONG, 1),
        ({"short": ["x"] * 70_000, "url": LONG}, 0),
    ],
    ids=["images", "lists", "quoted", "escape", "unicode", "name", "alone", "many strings"],
)
def test_values_are_those_of_json(value: object, cut: int) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()
    assert len(LongStrings(data)._found) == cut
    assert parse(data) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{{"url": "{LONG}"', "column"),
        (f'{{"url": "{LONG}}}', "Unterminated string"),
        (f'{{"url": "{LONG}\n{LONG}"}}', "control character"),
        (f'{{"url": "x"{" " * 200_000}"y"}}', "delimiter"),
        (f'{{"url": x{LONG}x"}}', "line 1, column 9"),
    ],
    ids=["end", "quote", "control", "between", "outside"],
)
def test_errors_name_the_place_in_the_whole_text(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text.encode())
