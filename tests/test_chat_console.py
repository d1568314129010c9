"""Conversations, their commands and how answers are shown, with a model that says what a test wants."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ikcli.chat.parser import ChatDelta
from ikcli.console import slash, transcript
from ikcli.console.answers import Answer, AnswerCounts, Body, Gather
from ikcli.console.conversation import Conversation
from ikcli.console.render import Fancy, PlainRenderer, call_line, finished_blocks
from ikcli.console.repl import Repl
from ikcli.console.start import request_fields
from ikcli.errors import IkError
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

CALL = [ChatDelta(index=0, id="a", name="weather"), ChatDelta(index=0, arguments='{"city": '),
        ChatDelta(index=0, arguments='"Paris"}')]  # fmt: skip


class Said:
    """A stream of given pieces; `stop` as the answer ends."""

    def __init__(self, deltas: Sequence[ChatDelta], stop: str = "eos") -> None:
        self._deltas, self._stop = deltas, stop
        self.answer = Answer("cancelled")

    def __iter__(self) -> Iterator[ChatDelta]:
        gather = Gather()
        for delta in self._deltas:
            gather.add(delta)
            yield delta
        self.answer = Answer(
            self._stop, message=gather.message, counts=AnswerCounts(n_prompt=3, n_predicted=2, n_ctx=99)
        )

    def cancel(self) -> None:
        """Nobody does."""


class Script:
    """A model with given answers; one that is an error is raised."""

    name, load_ms, has_template, reads_images = "script", 0.0, True, True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[Body] = []

    def chat(self, body: Body) -> Said:
        self.bodies.append(json.loads(json.dumps(body)))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, Said) else Said([ChatDelta(content=answer)])

    def complete(self, body: Body) -> Said:
        raise AssertionError

    def check(self, body: Body) -> None:
        if "top_k" in body and not isinstance(body["top_k"], int):
            raise IkError("top_k must be an integer")

    def settings(self) -> dict[str, Any]:
        return {"temperature": 0.8, "top_k": 40, "n_ctx": 99}

    def close(self) -> None:
        """Nothing to free."""


class Keys:
    """Inputs of a person, one after the other; an exception is raised."""

    edits = True

    def __init__(self, *inputs: Any) -> None:
        self.inputs = list(inputs)
        self.prompts: list[tuple[str, str]] = []

    def read(self, prompt: str, default: str = "") -> str:
        self.prompts.append((prompt, default))
        if not self.inputs:
            raise EOFError
        found = self.inputs.pop(0)
        if isinstance(found, str):
            return found
        raise found


def talk(script: Script, *inputs: Any) -> tuple[Repl, Keys, str, str]:
    """The conversation, what was asked, and what was printed on stdout and stderr."""
    keys, out, err = Keys(*inputs), io.StringIO(), io.StringIO()
    repl = Repl(Conversation(script), keys, PlainRenderer(out, err))  # type: ignore[arg-type]
    repl.run()
    return repl, keys, out.getvalue(), err.getvalue()


def roles(repl: Repl) -> str:
    return " ".join(m["role"] for m in repl.conversation.messages)


def test_images_go_with_the_next_message(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"pixels")
    script = Script("a cat", "a dog", "again", "plain")
    inputs = (f"/image {picture}", "what is it?", f"/image {picture}", f"/image {picture}", "/image off",
              f"/image {picture}", "and now?", "/edit and this?", "bye")  # fmt: skip
    repl, _, _, err = talk(script, *inputs)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cGl4ZWxz"}}
    asked = [body["messages"][-1]["content"] for body in script.bodies]
    texts = ("what is it?", "and now?", "and this?")
    assert asked == [*([part, {"type": "text", "text": text}] for text in texts), "bye"]
    assert "1 image with the next message" in err and "2 images with" in err and "no images with" in err
    file = tmp_path / "talk.json"
    transcript.save(repl.conversation, file)
    transcript.load(repl.conversation, file)
    assert repl.conversation.messages[0]["content"][0] == part


def test_images_that_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    talk(script, f"/image {tmp_path}/none.png", f"/image {tmp_path}")
    assert [line for line in capsys.readouterr().err.splitlines() if "cannot read" in line][1:]
    script.reads_images = False
    talk(script, f"/image {tmp_path}/none.png")
    assert "give its projector with --mmproj FILE" in capsys.readouterr().err


def test_messages_regen_undo_and_clear() -> None:
    script = Script("one", "two", "TWO")
    repl, _, out, err = talk(script, "a", "b", "/regen", "/undo", "/stats")
    assert out == "one\ntwo\nTWO\n" and roles(repl) == "user assistant"
    assert script.bodies[1] == script.bodies[2]
    assert " ".join(m["content"] for m in script.bodies[1]["messages"]) == "a one b"
    assert "all answers: prompt 9 tokens and 0 cached, answer 6 tokens" in err
    repl, _, _, err = talk(Script("one"), "a", "/clear", "/undo")
    assert roles(repl) == ""


def test_a_failed_answer_takes_nothing_away(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("one", IkError("too long"), IkError("no"))
    repl, keys, _, _ = talk(script, "a", "b", "/regen")
    assert roles(repl) == "user assistant"
    assert keys.prompts[2] == ("> ", "b")  # offered again
    assert capsys.readouterr().err == "error: too long\nerror: no\n"
    repl, keys, _, err = talk(Script(KeyboardInterrupt(), "one"), "a", "a")
    assert roles(repl) == "user assistant" and keys.prompts[1] == ("> ", "a") and err == "[stopped]\n"


def test_cut_off_answers_stay_and_calls_of_them_go() -> None:
    script = Script(Said([ChatDelta(content="half"), *CALL], stop="cancelled"), Said([], stop="cancelled"), "more")
    repl, keys, out, err = talk(script, "a", "b", "go on")
    assert "[stopped]" in err and "weather" in out
    assert repl.conversation.messages[1] == {"role": "assistant", "content": "half"}
    assert roles(repl) == "user assistant user user assistant"
    assert [p for p, _ in keys.prompts] == ["> "] * 4


def test_tool_calls_wait_for_their_results(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    file.write_text(json.dumps(tool))
    two = [*CALL, ChatDelta(index=1, id="b", name="time"), ChatDelta(index=1, arguments="{}")]
    script = Script(Said(two), "It rains at noon.")
    repl, keys, out, err = talk(script, f"/tools {file}", "How is it?", "rain", "12:00", "/tools off")
    assert [p for p, _ in keys.prompts][2:4] == ["result of weather> ", "result of time> "]
    assert out == '→ calls weather(city="Paris")\n→ calls time()\nIt rains at noon.\n' and "tools: weather" in err
    assert script.bodies[0]["tools"] == [tool] and repl.conversation.tools == []
    said = script.bodies[1]["messages"]
    assert said[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert said[2] == {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": "a"}
    assert said[3]["tool_call_id"] == "b"


def test_settings(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("x", "y")
    lines = ("temp 0", "top_k=7", "top_k many", "nonsense 1", "n_ctx 4", 'stop ["a"]', "stream true")
    then = ("hi", "/settings temp default", "/settings", "ho")
    _, _, _, err = talk(script, *(f"/settings {line}" for line in lines), *then)
    wrong = capsys.readouterr().err.splitlines()
    expected = ("top_k must be", "nonsense is not a setting", "set with -c", "stream is not a setting")
    assert [e in line for e, line in zip(expected, wrong, strict=True)] == [True] * 4
    set_ones = {name: script.bodies[0][name] for name in ("temperature", "top_k", "stop")}
    assert set_ones == {"temperature": 0, "top_k": 7, "stop": ["a"]}
    assert "temperature" not in script.bodies[1]
    assert err.count("top_k                    7 *") == 2 and "n_ctx                    99\n" in err


def test_settings_of_a_file_that_are_wrong_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "a": '{"settings": {"top_k": "x"}}', "b": '{"settings": {"nonsense": 1}}', "c": "[1]", "d": "{",
        "e": '{"settings": 5}', "f": '{"grammar": "root ::= \\"a\\""}', "g": '{"messages": []}',
    }  # fmt: skip
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    lines = [f"/settings load {tmp_path / name}" for name in (*files, "none")]
    more = ("/settings save", "/settings load", f"/settings save {tmp_path}/x/y")
    repl, _, _, _ = talk(Script(), f"/tools {tools}", "/settings top_k 3", *lines, *more)
    err = capsys.readouterr().err.splitlines()
    expected = (
        *("top_k must be", "nonsense is not a setting", "has no settings", "is not JSON", "has no settings"),
        *(
            "/tools off",
            "messages is not a setting",
            "cannot read",
            "save needs the name",
            "load needs the name",
            "cannot write",
        ),
    )
    assert [e in line for e, line in zip(expected, err, strict=True)] == [True] * len(expected)
    assert repl.conversation.fields == {"top_k": 3}


def test_save_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    script = Script(Said([ChatDelta(reasoning="hm"), ChatDelta(content="one")]), "two", "three")
    lines = ("/system Be brief.", "/settings top_k 3", "a", f"/save {file}", f"/save {tmp_path}/x/y")
    first, _, _, _ = talk(script, *lines)
    assert "cannot write" in capsys.readouterr().err
    second, _, _, err = talk(script, f"/load {file}", "/think", "b")
    assert "hm" in err and second.conversation.system == "Be brief."
    assert second.conversation.messages[:2] == first.conversation.messages
    assert script.bodies[1]["top_k"] == 3
    assert script.bodies[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    other.write_text('[{"role": "user", "content": "a"}]')
    third, _, _, _ = talk(script, f"/load {other}", "/regen")
    assert roles(third) == "user assistant"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "{}", "[]x", '{"messages": 1}', '{"messages": [{"role": 1}]}', '{"messages": [], "settings": 1}',
     '{"messages": [], "tools": [1]}', '{"messages": [], "settings": {"top_k": "x"}}', "\\" * 99, "[" * 99999],
)  # fmt: skip
def test_files_that_are_no_conversation_change_nothing(tmp_path: Path, capsys, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    repl, _, _, _ = talk(Script("one"), "a", f"/load {file}", f"/tools {file}")
    assert roles(repl) == "user assistant" and repl.conversation.tools == []
    err = capsys.readouterr().err
    assert err.startswith("error: ") and str(file) in err.splitlines()[0]


def test_commands_that_cannot_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = ("/regen", "/edit", "/undo", "/think", "/think loud", "/save", "/load", "/grammar none.gbnf", "/tools none",
             "/nonsense", "/", "/load ~nobody-of-that-name/x")  # fmt: skip
    talk(Script(), *lines)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == len(lines) and all(line.startswith("error: ") for line in err)


def test_edit_and_leaving() -> None:
    script = Script("one", "two")
    repl, keys, _, _ = talk(script, "a", "/edit b", "/edit", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    assert keys.prompts[3] == ("> ", "b") and keys.inputs == ["never read"] and roles(repl) == ""
    assert script.bodies[1]["messages"] == [{"role": "user", "content": "b"}]
    assert talk(Script(), KeyboardInterrupt(), "/help", KeyboardInterrupt(), "/bye", "x")[1].inputs == ["x"]


def test_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repl, _, _, _ = talk(Script())
    (tmp_path / "tools.json").touch()
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path)

    def texts(before: str) -> list[str]:
        return [text for text, _, _ in slash.completions(repl, before)]

    assert texts("/re") == ["/regen"] and texts("re") == [] and len(texts("/")) == len(slash.COMMANDS)
    assert texts("/settings top_") == ["top_k", "top_n_sigma", "top_p"] and texts("/settings top_k 1") == []
    assert texts("/tools t") == ["tables/", "tools.json"] and texts("/load nowhere/x") == [] and texts("/clear x") == []


def test_calls_are_readable() -> None:
    assert call_line("f", '{"a": "ä", "b": [1]}') == 'f(a="ä", b=[1])'
    assert call_line("f", "") == "f()" and call_line("f", ' {"a": ') == 'f({"a":)' and call_line("f", "[1]") == "f([1])"


def test_plain_output_keeps_thoughts_apart() -> None:
    out, err = io.StringIO(), io.StringIO()
    PlainRenderer(out, err).show([ChatDelta(reasoning="hm"), ChatDelta(reasoning="m"), ChatDelta(content="*yes*\n")])
    assert (out.getvalue(), err.getvalue()) == ("*yes*\n", "hmm\n")


def shown(text: str, *, thinking: str = "folded", reasoning: str = "", step: int = 3) -> str:
    """What stays on a terminal of 60 x 20 characters, without control sequences."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20, color_system=None, highlight=False)
    fancy = Fancy(console)
    fancy.thinking = thinking
    deltas = [ChatDelta(reasoning=reasoning)] if reasoning else []
    fancy.show([*deltas, *(ChatDelta(content=text[i : i + step]) for i in range(0, len(text), step))])
    return console.file.getvalue()  # type: ignore[attr-defined]


MARKDOWN = """# Title

Some *text* here.

```python
x = 1

y = 2
```

1. one

   more of one

2. two

The end."""


def lines_of(text: str) -> list[str]:
    """What is left on the screen, without control sequences and empty lines."""
    plain = re.sub(r"[^\n]*\r\x1b\[2K", "", text)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", plain)
    return [line.strip() for line in plain.splitlines() if line.strip()]


def test_markdown_comes_out_the_same_in_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikcli.console.render._REDRAW_SECONDS", 1e9)  # only what stays
    whole = shown(MARKDOWN, step=len(MARKDOWN))
    for step in (1, 2, 5, 17):
        assert lines_of(shown(MARKDOWN, step=step)) == lines_of(whole), step
    assert "y = 2" in whole and "*" not in whole and "2 two" in whole


def test_an_answer_is_drawn_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikcli.console.render._REDRAW_SECONDS", -1.0)
    monkeypatch.setattr("ikcli.console.render._SHARE", 0)
    text = "word " * 400
    drawn = shown(text, step=50)
    assert drawn.count("word word") > 400 / 12 * 2  # again and again, and whole at the end
    assert len(max(drawn.split("\x1b[2K"), key=len).split("\n")) >= 400 * 5 // 60


def test_thoughts_are_folded_or_shown() -> None:
    folded = lines_of(shown("yes", reasoning="secret thoughts"))
    assert folded[-2].endswith("2 words (/think shows them)") and folded[-1] == "yes" and len(folded) == 2
    unfolded = lines_of(shown("yes", reasoning="secret thoughts", thinking="shown"))
    assert unfolded == ["secret thoughts", "yes"]


def test_line_ends_of_a_model_are_kept() -> None:
    poem = "Roses are red\nviolets are blue\n\n```\na\nb\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert lines_of(shown(poem))[:4] == ["Roses are red", "violets are blue", "a", "b"]
    assert not any("|" in line for line in lines_of(shown(poem)))  # still a table


def test_blocks() -> None:
    assert finished_blocks("a\n\nb") == ("a\n\n", "b")
    assert finished_blocks("a\n\n") == ("", "a\n\n")  # what follows may belong to it
    assert finished_blocks("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert finished_blocks("- a\n\n- b\n\n  c\n\nd") == ("- a\n\n- b\n\n  c\n\n", "d")


def test_options_of_the_template_are_sent_to_a_server() -> None:
    config = RunConfig(server=ServerConfig(reasoning_effort="low", reasoning_preserve=False))
    found = request_fields(config, {"server.reasoning_effort", "server.reasoning_preserve"})
    assert found == {"chat_template_kwargs": {"reasoning_effort": "low", "preserve_reasoning": False}}
    off = request_fields(RunConfig(server=ServerConfig(reasoning_effort="none")), {"server.reasoning_effort"})
    assert off["reasoning_effort"] == "none"
    assert request_fields(RunConfig(), ()) == {}
