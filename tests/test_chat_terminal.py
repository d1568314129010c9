"""`ik chat` in a pseudo-terminal, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_server import Server, wait_for
from pty_client import Terminal
from tiers import some

pytestmark = pytest.mark.skipif("sys.platform == 'win32'")
SHORT = ("chat", "-t", "1", "-c", "512", "-n", "24", "--temp", "0")
ENDLESS = ("chat", "-t", "1", "-c", "512", "-n", "100000000", "--ignore-eos", "--temp", "0")


@pytest.mark.slow  # a program of its own in a terminal
def test_conversation_save_load_undo_and_history(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with Terminal(*SHORT, home=tmp_path) as t:
        t.say("Hello there")
        t.expect("Return the value of the string")
        t.say("/regen")
        t.expect("Return the value of the string")
        t.say("/stats")
        t.expect("conversation: 2 messages with demo.gguf")
        t.say(f"/save {file}")
        t.expect("saved 2 messages")
        t.say("/undo")
        t.expect("forgotten; 0 messages left")
        t.say(f"/load {file}")
        t.expect("loaded 2 messages")
        t.say("/sav x")
        t.expect("unknown command /sav; did you mean /save")
        t.say("\x1b[A\x1b[A\x1b[A")  # up, past /sav and /load: /undo
        t.expect("forgotten; 0 messages left")
        t.wait_asked()
        t.send("\x04")
        assert t.ended() == 0
    saved = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"] and saved[0]["content"] == "Hello there"
    history = (tmp_path / "ik" / "chat-history").read_text()
    assert "+Hello there" in history
    with Terminal(*SHORT, home=tmp_path) as t:
        t.wait_asked()
        t.send("Hello")
        t.expect("there")  # the rest of it, from the run before
        t.send("\x1b[C\r")
        t.expect("Return the value of the string")
        t.say("/exit")
        assert t.ended() == 0


def test_ctrl_c_stops_the_answer_and_twice_leaves(tmp_path: Path) -> None:
    with Terminal(*ENDLESS, home=tmp_path) as t:
        t.say("Hello there")
        t.expect("Return the value")
        t.send("\x03")
        t.expect(r"\[stopped\]")
        t.say("/settings n_predict 4")
        t.expect("n_predict +4")
        t.say("/regen")
        t.expect(r"Return the")
        t.expect("the limit of tokens")
        t.wait_asked()
        t.send("/unfinished\x03")
        t.expect("Ctrl-C once more")
        t.say("/stats")
        t.expect("conversation: 2 messages")
        t.wait_asked()
        t.send("\x03")
        t.wait_asked()
        t.send("\x03")
        assert t.ended() == 0
        assert "llama_print_timings:        eval time" in t.text


@pytest.mark.parametrize(
    "first_line_end", some(["\x1b\r", "\\\r", "\n"], ["\x1b\r"]), ids=["alt-enter", "backslash", "ctrl-j"]
)
def test_several_lines_are_one_message(tmp_path: Path, first_line_end: str) -> None:
    file = tmp_path / "talk.json"
    with Terminal(*SHORT, home=tmp_path) as t:
        t.wait_asked()
        t.send("one" + first_line_end + "two\r")
        t.expect(r"\n.*\w+")
        t.say(f"/save {file}")
        t.expect("saved 2 messages")
        t.say("/quit")
        assert t.ended() == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "one\ntwo"


@pytest.mark.slow  # a program of its own in a terminal
def test_edit_offers_the_last_message(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with Terminal(*SHORT, home=tmp_path) as t:
        t.say("Hello")
        t.expect(r"\n.*\w+")
        t.say("/edit")
        t.say(" again")
        t.say(f"/save {file}")
        t.expect("saved 2 messages")
        t.wait_asked()
        t.send("\x04")
        assert t.ended() == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "Hello again"


def test_commands_and_settings_are_completed(tmp_path: Path) -> None:
    with Terminal(*SHORT, home=tmp_path) as t:
        t.wait_asked()
        t.send("/settings repeat_l")
        t.expect("repeat_last_n")  # in the menu
        t.send("\t")
        t.expect("repeat_last_n")
        t.send(" 7\r")
        t.expect(r"repeat_last_n +7")
        t.say("/exit")
        assert t.ended() == 0


def test_simple_io_without_editor_and_markdown(tmp_path: Path) -> None:
    with Terminal(*SHORT, "-cnv", "--simple-io", home=tmp_path) as t:
        t.expect("> ")
        t.send("Hello there\n")
        t.expect(r"Return the value of the string \*name\*")  # Markdown stays as the model wrote it
        t.expect("\n> ")
        t.interrupt("Ctrl-C once more")
        t.send("\x04")
        assert t.ended() == 0
        assert "\x1b[?2004h" not in t.raw


@pytest.mark.slow  # a program of its own in a terminal
def test_text_in_turns_with_a_reverse_prompt(tmp_path: Path) -> None:
    options = ("-i", "-p", "Return the value", "-r", "name", "--in-prefix", "[", "--in-suffix", "]", "-n", "40")
    with Terminal(*SHORT[:5], "--temp", "0", *options, home=tmp_path) as t:
        t.expect(r"Return the value of the \*name")
        t.wait_asked()
        t.send("name\r")
        t.expect(r"\]")
        t.expect(r"\w")
        t.wait_asked()
        t.send("\x04")
        assert t.ended() == 0


@pytest.mark.slow  # a program of its own in a terminal
def test_ctrl_c_stops_an_answer_of_a_server(tmp_path: Path) -> None:
    server = Server("--slots", log=tmp_path / "log.txt")
    try:
        server.wait_ready()
        options = ("--url", server.base, "-n", "100000000", "--ignore-eos", "--temp", "0")
        with Terminal("chat", *options, home=tmp_path) as t:
            t.say("Hello there")
            t.expect("Return the value")
            assert server.busy() == 1
            t.send("\x03")
            t.expect(r"\[stopped\]")
            wait_for(lambda: server.busy() == 0)
            t.say("/stats")
            t.expect("conversation: 2 messages")
            server.stop()
            t.say("Are you there?")
            t.expect("error: .*is the server running")
            t.wait_asked()
            t.send("\x03")  # the message is offered again
            t.say("/exit")
            assert t.ended() == 0
    finally:
        server.stop()
