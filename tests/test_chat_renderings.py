"""Renderings of the constructs that published templates use, recorded from `render_jinja_template` of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikcli.chat import ChatTemplate

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "chat_renderings.json").read_text("utf-8"))


@pytest.mark.parametrize("name", RECORDED["templates"])
def test_renders_as_transformers_does(name: str) -> None:
    entry = RECORDED["templates"][name]
    assert ChatTemplate(entry["source"]).render(RECORDED["messages"], tools=RECORDED["tools"]) == entry["text"]
