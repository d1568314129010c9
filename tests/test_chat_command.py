"""`ik chat` in pipes: what goes to stdout, prompt cache, reverse prompts, grammars, a running server, wrong input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Server

from ikcli.main import main

BASE = ("-t", "1", "-c", "512", "--temp", "0")
PROMPT = "def add(a, b): return a plus b of the list"


class Pipe(io.TextIOWrapper):
    """Standard input that is no terminal."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Pipe(stdin))
        code = main(["chat", *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    live = Server("--api-key", "key", log=tmp_path_factory.mktemp("serve") / "log.txt")
    try:
        live.wait_ready()
        yield live
    finally:
        live.stop()


def n_prompt(err: str) -> int:
    """Prompt tokens that were computed."""
    found = re.search(r"prompt eval time = .*?/ +(\d+) tokens", err)
    assert found, err
    return int(found[1])


def test_a_pipe_gets_exactly_the_text_that_a_server_gives(server: Server) -> None:
    command = [sys.executable, "-m", "ikcli", "chat", *BASE, "-p", "Once", "-n", "16"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    url = ("--url", server.base, "--api-key", "key", "--temp", "0")
    there = [sys.executable, "-m", "ikcli", "chat", *url, "-p", "Once", "-n", "16"]
    other = subprocess.run(there, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert done.returncode == other.returncode == 0, (done.stderr, other.stderr)
    import httpx

    body = {"prompt": "Once", "n_predict": 16, "temperature": 0}
    headers = {"Authorization": "Bearer key"}
    served = httpx.post(server.base + "/completion", json=body, headers=headers, timeout=120).json()["content"]
    assert done.stdout.decode() == other.stdout.decode() == "Once" + served
    assert b"llama_print_timings:" in done.stderr and b"llama_print_timings:" in other.stderr


def test_prompt_from_a_pipe_a_file_and_escapes(chat, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one\\ttwo\n")
    end = (*BASE, "-n", "3")
    code, piped, _ = chat(*end, stdin="one\ttwo\n")
    assert code == 0 and piped.startswith("one\ttwo") and len(piped) > len("one\ttwo")
    assert chat(*end, "-f", str(file))[1] == chat(*end, "-p", "one\\ttwo")[1] == piped
    assert chat(*end, "-p", "one\\ttwo", "--no-escape")[1].startswith("one\\ttwo")
    assert "one\ttwo" + chat(*end, "-p", "one\ttwo", "--no-display-prompt")[1] == piped


def test_single_turn_and_conversation_in_a_pipe(chat) -> None:
    code, out, _ = chat(*BASE, "-st", "-p", "Hello there", "-n", "24")
    assert code == 0 and out.startswith("Return the value") and out.endswith("\n") and out.count("\n") == 1
    code, both, err = chat(*BASE, "-cnv", "-n", "24", stdin="Hello there\n/undo\nHello there\n/nonsense\n/exit\nmore\n")
    assert (code, both) == (0, out + out)
    assert "unknown command /nonsense" in err
    err = chat(*BASE, "-st", "-n", "24", stdin="Hello there")[2]
    other = chat(*BASE, "-st", "-n", "24", "-sys", "You are a pirate.", stdin="Hello there")[2]
    assert n_prompt(other) > n_prompt(err) + 5


def test_endless_text_with_shifted_context_and_special_tokens(chat) -> None:
    code, out, _ = chat(*BASE[:2], "--temp", "0", "-c", "256", "-p", "Once", "-n", "300", "--ignore-eos", "--keep", "4")
    assert code == 0 and len(out) > 300
    code, full, err = chat(*BASE[:2], "--temp", "0", "-c", "256", "-p", "Once", "-n", "-2", "--ignore-eos")
    assert code == 0 and out.startswith(full[:200])
    assert 200 < int(re.search(r"/ +(\d+) runs", err)[1]) < 256  # type: ignore[index]
    plain = chat(*BASE, "-p", "Once", "-n", "16", "-l", "2+100", "-l", "3-inf")[1]
    assert plain == "Once" and "<|im_start|>" in chat(*BASE, "-p", "Once", "-n", "4", "-l", "2+100", "-sp")[1]


def test_reverse_prompt_and_grammar(chat, tmp_path: Path) -> None:
    whole = chat(*BASE, "-p", "Once", "-n", "16")[1]
    word = whole[len("Once") :].split()[1]
    assert chat(*BASE, "-p", "Once", "-n", "16", "-r", word)[1] == whole[: whole.index(word, 4) + len(word)]
    assert chat(*BASE, "-p", "Say:", "--grammar", 'root ::= "yes" | "no"', "--no-display-prompt")[1] in ("yes", "no")
    assert json.loads(chat(*BASE, "-st", "-p", "Hi", "-j", '{"enum": [{"n": 7}]}')[1]) == {"n": 7}
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["left"]}')
    lines = f"/grammar {schema}\nHi\n/grammar off\n/grammar {tmp_path}/none\n"
    code, out, err = chat(*BASE, "-cnv", "-n", "9", stdin=lines)
    assert (code, out.strip()) == (0, '"left"') and "grammar: a JSON schema" in err and "cannot read" in err


def test_seed_and_samplers(chat) -> None:
    options = ("-t", "1", "-c", "512", "-p", "Once", "-n", "16", "--temp", "5", "--top-k", "0", "--top-p", "1")
    one, same, other = (chat(*options, "--min-p", "0", "-s", seed)[1] for seed in ("1", "1", "2"))
    assert one == same != other
    assert chat(*options, "--sampling-seq", "k", "--top-k", "1")[1] == chat(*BASE, "-p", "Once", "-n", "16")[1]


def test_thoughts_and_their_budget(chat) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    options = (*BASE, "-st", "-p", "Hello", "--chat-template", template, "--reasoning-budget", "4", "-n", "20")
    code, out, err = chat(*options)
    raw = chat(*options, "--reasoning-format", "none")[1]
    thought, _, answer = raw.partition("</think>")
    assert code == 0 and thought.strip() and answer.strip()
    assert out.strip() == answer.strip() and thought.strip() in err


def test_guessing_tokens_changes_no_text(chat) -> None:
    options = ("-t", "1", "-c", "512", "--temp", "0", "-p", "Once", "-n", "120", "--ignore-eos")
    code, out, err = chat(*options, "--spec-type", "ngram-simple")
    assert code == 0 and out == chat(*options)[1] and "/   120 runs" in err


def test_prompt_cache_on_disk(chat, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    options = (*BASE, "-p", PROMPT, "-n", "12", "--prompt-cache", str(file))
    code, text, err = chat(*options, "--prompt-cache-ro")
    assert code == 0 and not file.exists()
    n = n_prompt(err)
    assert chat(*options)[1] == text and file.is_file()
    written = file.read_bytes()
    code, again, err = chat(*options)
    assert (code, again, n_prompt(err)) == (0, text, 1) and file.read_bytes() == written and n > 10
    longer = (*BASE, "-p", PROMPT + " and more of it", "-n", "4", "--prompt-cache", str(file))
    code, other, err = chat(*longer, "--prompt-cache-ro")
    assert 1 < n_prompt(err) < n and other == chat(*BASE, "-p", PROMPT + " and more of it", "-n", "4")[1]
    assert file.read_bytes() == written
    chat(*options, "--prompt-cache-all")
    assert len(file.read_bytes()) > len(written)
    said = chat(*options)[1]
    assert n_prompt(chat(*BASE, "-p", said, "-n", "1", "--prompt-cache", str(file))[2]) == 1


def test_prompt_cache_of_a_conversation(chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.bin"
    options = (*BASE, "-cnv", "-n", "24", "--prompt-cache", str(file), "-sys", "You are a very polite and helpful one.")
    code, first, err = chat(*options, "--prompt-cache-all", stdin="Hello there\nMore\n")
    assert code == 0
    code, second, other = chat(*options, "--prompt-cache-ro", stdin="Hello there\nMore\n")
    assert (code, second) == (0, first) and n_prompt(other) < n_prompt(err)


def test_wrong_prompt_caches(chat, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"nonsense" * 20)
    nowhere = tmp_path / "a" / "b"
    for name, word in ((file, "is not a saved slot"), (tmp_path, "is a folder"), (nowhere, "does not exist")):
        code, out, err = chat(*BASE, "-p", "x", "--prompt-cache", str(name))
        assert code in (1, 2) and out == "" and word in err and "Traceback" not in err
    assert file.read_bytes() == b"nonsense" * 20


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-m", "none.gguf", "-p", "x"), "none.gguf"),
        (("-p", "x", "-f", "y"), "-p and -f"),
        (("-f", "none.txt"), "cannot read none.txt"),
        (("-f", "."), "cannot read ."),
        (("-sysf", "none.txt", "-st", "-p", "x"), "cannot read none.txt"),
        (("-sys", "a", "-sysf", "b"), "-sys and -sysf"),
        (("-sys", "a", "-p", "x"), "-sys belongs to a conversation"),
        ((), "no prompt is given"),
        (("-st",), "-st answers one prompt"),
        (("-st", "-no-cnv", "-p", "x"), "-no-cnv"),
        (("-p", "x", "--prompt-cache-all"), "--prompt-cache FILE"),
        (("-p", "x", "--grammar", "nonsense"), "grammar"),
        (("-p", "x", "-j", "{"), "--json-schema is not JSON"),
        (("-p", "x", "--samplers", "nonsense"), "nonsense"),
        (("-p", "x", "--logit-bias", "nonsense"), "--logit-bias"),
        (("-p", "x " * 600), "exceeds the available context size"),
        (("-cnv", "--chat-template", "{% if %}"), "template"),
        (("-p", "x", "--url", "ftp://host"), "is not the address of a server"),
        (("-p", "x", "--url", "http://127.0.0.1:1"), "is the server running?"),
        (("-p", "x", "--url", "http://127.0.0.1:99999"), "port"),
        (("-p", "x", "--url", "http://127.0.0.1:1", "-m", "a.gguf"), "-m applies to a model in this process"),
        (("-p", "x", "--in-prefx", "y"), "did you mean --in-prefix"),
    ],
)
def test_wrong_input_is_one_sentence(chat, args, words) -> None:
    code, out, err = chat(*BASE, *args)
    assert code in (1, 2) and out == "", (out, err)
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last and "Traceback" not in err


def test_conversation_with_a_server(chat, server: Server, tmp_path: Path) -> None:
    here = chat(*BASE, "-st", "-p", "Hello there", "-n", "24")[1]
    url = ("--url", server.base, "--temp", "0", "-n", "24")
    code, there, err = chat(*url, "--api-key", "key", "-st", "-p", "Hello there")
    assert (code, there) == (0, here) and "prompt eval time" in err
    lines = f"Hello there\n/stats\n/settings\n/settings top_k x\n/regen\n/save {tmp_path / 'talk.json'}\n"
    code, talk, err = chat(*url, "--api-key", "key", "-cnv", stdin=lines)
    assert (code, talk) == (0, here * 2) and "conversation: 2 messages" in err and "top_k must be an integer" in err
    code, again, err = chat(*url, "--api-key", "key", "-st", "-p", "Hello there", "-c", "99", "-fa", "--draft-max", "3")
    assert (code, again) == (0, here) and "not used with --url, the server has its own: -c -fa --draft-max" in err
    for key in ((), ("--api-key", "wrong")):
        for mode in (("-st", "-p", "x"), ("-p", "x"), ("-cnv",)):
            code, out, err = chat(*url, *key, *mode, stdin="Hello there\n")
            assert (code, out) == (1, "") and err.count("API Key") == 1
    code, out, err = chat(*url, "--api-key", "key", "-p", "x", "--grammar", "root ::= (")
    assert (code, out) == (1, "") and "error: " in err


def test_settings_of_a_model_and_of_a_server_are_kept_in_files(chat, server: Server, tmp_path: Path) -> None:
    """What is loaded again is what was there, and a person's own file is checked as a whole."""
    here, there, own, talk = (tmp_path / f"{name}.json" for name in ("here", "there", "own", "talk"))
    own.write_text('{"n_predict": 5, "seed": 7}')
    lines = "\n/settings save {0}\n/settings temperature 1.5\n/settings load {0}\n/settings load {1}\n/save {2}\n"
    for file, where in ((here, BASE), (there, ("--url", server.base, "--api-key", "key", "--temp", "0"))):
        code, _, err = chat(*where, "-cnv", stdin="/settings top_k 7" + lines.format(file, own, talk))
        assert code == 0 and "error" not in err and "loaded 2 settings" in err, err
        image = json.loads(file.read_text())["settings"]
        assert (image["top_k"], image["temperature"], image["top_p"]) == (7, 0, 0.95) and len(image) > 25
        assert json.loads(talk.read_text())["settings"] == {"n_predict": 5, "seed": 7}
        assert f"loaded {len(image)} settings" in err
    code, out, _ = chat(*BASE, "-cnv", stdin=f"/settings load {talk}\nHello there\n")
    assert code == 0 and out == chat(*BASE, "-st", "-p", "Hello there", "-n", "5")[1]


def test_text_in_turns(chat, server: Server) -> None:
    """With a pipe as the person; a server gives the same."""
    options = ("-i", "-p", "Return the value", "-r", "name", "-n", "20", "--temp", "0", "--in-suffix", "It is")
    code, out, _ = chat("-t", "1", "-c", "512", *options, stdin="of it\\\nall\n\n")
    assert code == 0 and out.startswith("Return the value of the *name") and "It is" in out
    assert chat("--url", server.base, "--api-key", "key", *options, stdin="of it\\\nall\n\n")[1] == out


def test_tool_calls_of_a_model_and_of_a_server(chat, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    city = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    file.write_text(json.dumps([{"type": "function", "function": {"name": "weather", "parameters": city}}]))
    lines = f"/tools {file}\n/settings tool_choice required\nHow is it?\n/settings tool_choice none\nIt rains.\n"
    options = ("-cnv", "--temp", "0", "-n", "60")
    code, out, _ = chat("-t", "1", "-c", "1024", *options, stdin=lines)
    assert code == 0 and out.startswith('→ calls weather(city="Paris")\n') and out.count("\n") >= 2
    assert chat("--url", server.base, "--api-key", "key", *options, stdin=lines)[1] == out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ikcli", "chat", *BASE, "-p", "Once", "-n", "4"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=300)
    last = done.stderr.decode().strip().splitlines()[-1]
    assert done.returncode == 1 and last == "error: cannot write the text: No space left on device"
