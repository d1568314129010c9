"""Which model a name means: types in file names, parts, defaults, near misses."""

from __future__ import annotations

import pytest

from ikcli.errors import IkError, UsageError
from ikcli.hub.names import ModelRef, RemoteFile, choose, is_model, parse_ref, part_names, projector_of, quants_of


def files(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, 10, "0" * 64) for path in paths]


def names(*paths: str) -> list[str]:
    return [quant.name for quant in quants_of(files(*paths))]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-1.7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("model-IQ4_KS_R4.gguf", "IQ4_KS_R4"),
        ("model-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-bf16.gguf", "BF16"),
        ("BF16/model-BF16-00001-of-00001.gguf", "BF16"),
        ("model_iq1_s.gguf", "IQ1_S"),
        ("tinyllama.gguf", "tinyllama"),
        ("Qwen-Q4.gguf", "Q4"),
        ("model-7B-v0.3-Q5_K_S-imat.gguf", "Q5_K_S"),
        ("model-Q4_K_M.v2-bf16.gguf", "BF16"),
        ("Q-star-7b.gguf", "Q-star-7b"),
    ],
)
def test_the_type_is_read_from_the_file_name(path: str, name: str) -> None:
    assert names(path) == [name]


def test_parts_are_one_model_in_order() -> None:
    paths = [f"Q8_0/m-Q8_0-0000{i}-of-00003.gguf" for i in (2, 1, 3)]
    (quant,) = quants_of(files(*paths))
    assert [f.path[-19:-14] for f in quant.files] == ["00001", "00002", "00003"]
    assert quant.n_bytes == 30
    assert part_names(paths[0]) == sorted(paths)
    assert part_names("m.gguf") == ["m.gguf"]


def test_projectors_and_matrices_are_no_models() -> None:
    paths = ("mmproj-F16.gguf", "m-imatrix.gguf", "imatrix.dat", "README.md", "m.mmproj-Q8_0.gguf", "a/M-Q8_0.GGUF")
    assert [p for p in paths if is_model(p)] == ["a/M-Q8_0.GGUF"]
    assert names(*paths) == ["Q8_0"]


def test_the_projector_of_a_model() -> None:
    def found(model: str, *paths: str) -> str | None:
        file = projector_of([RemoteFile(path, 1, "") for path in paths], model)
        return file.path if file is not None else None

    assert found("m-Q4_K_M.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf", "mmproj-m-BF16.gguf") == "mmproj-m-BF16.gguf"
    assert found("m.gguf", "mmproj-F32.gguf", "m.mmproj-f16.gguf") == "m.mmproj-f16.gguf"
    assert found("a/m.gguf", "mmproj-F16.gguf", "a/mmproj-model.gguf") == "a/mmproj-model.gguf"
    assert found("m.gguf", "m.gguf", "mmproj.md") is None


def test_names_are_unique_in_a_repository() -> None:
    assert names("a-7b-Q8_0.gguf", "a-13b-Q8_0.gguf", "a-7b-F16.gguf") == ["a-7b-Q8_0", "a-13b-Q8_0", "F16"]
    assert names("IQ2_KS/m-IQ2_KS.gguf", "smol-IQ2_KS/m-smol-IQ2_KS.gguf") == ["IQ2_KS", "smol-IQ2_KS"]
    assert names("x/m-Q8_0.gguf", "y/x/m-Q8_0.gguf") == ["x/m-Q8_0", "y/x/m-Q8_0"]


QUANTS = quants_of(files("m-IQ4_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-UD-Q2_K_XL.gguf"))


@pytest.mark.parametrize(
    ("asked", "found"),
    [("", "Q4_K_M"), ("q8_0", "Q8_0"), ("UD-q2_k_xl", "UD-Q2_K_XL"), ("Q2_K_XL", "UD-Q2_K_XL"), ("iq4_k", "IQ4_K")],
)
def test_choice(asked: str, found: str) -> None:
    assert choose(ModelRef("u/r", asked), QUANTS).name == found


def test_without_the_default_the_first() -> None:
    assert choose(ModelRef("u/r"), QUANTS[2:]).name == "Q8_0"
    assert choose(ModelRef("u/r"), quants_of(files("m-Q8_0.gguf", "m-UD-Q4_K_M.gguf"))).name == "UD-Q4_K_M"


def test_choice_by_file() -> None:
    quants = quants_of(files("x/m-Q8_0-00001-of-00002.gguf", "x/m-Q8_0-00002-of-00002.gguf", "m-F16.gguf"))
    assert choose(ModelRef("u/r", "", "m-F16.gguf"), quants).name == "F16"
    assert choose(ModelRef("u/r", "", "x/m-Q8_0-00002-of-00002.gguf"), quants).name == "Q8_0"
    assert choose(ModelRef("u/r", "", "m-Q8_0-00001-of-00002.gguf"), quants).name == "Q8_0"
    with pytest.raises(IkError, match=r"u/r has no m-F17\.gguf; did you mean m-F16\.gguf\?"):
        choose(ModelRef("u/r", "", "m-F17.gguf"), quants)


def test_a_quant_that_is_not_there_names_the_nearest_and_all() -> None:
    with pytest.raises(
        IkError, match=r"u/r has no Q4_K_S; did you mean Q4_K_M\? it has IQ4_K, Q4_K_M, Q8_0, UD-Q2_K_XL"
    ):
        choose(ModelRef("u/r", "Q4_K_S"), QUANTS)
    with pytest.raises(IkError, match="u/r has no huge; it has IQ4_K, "):
        choose(ModelRef("u/r", "huge"), QUANTS)


def test_missing_parts_are_named() -> None:
    with pytest.raises(IkError, match=r"lacks 1 of 3 parts of Q8_0: m-Q8_0-00002-of-00003\.gguf"):
        choose(ModelRef("u/r"), quants_of(files("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf")))


def test_without_gguf_the_checkpoint_is_proposed() -> None:
    with pytest.raises(IkError, match=r"u/r has no GGUF model; .* ik pull --checkpoint u/r"):
        choose(ModelRef("u/r"), quants_of(files("model.safetensors", "config.json")))


@pytest.mark.parametrize("text", ["", "user", "a/b/c", "user/repo:", "../x", "u/..", "user/re po", "u/r:../x", "/u/r"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not user/repo"):
        parse_ref(text)


def test_names() -> None:
    assert parse_ref("u/r.x-1:Q4_K_M") == ModelRef("u/r.x-1", "Q4_K_M")
    assert str(parse_ref("u/r:Q8_0")) == "u/r:Q8_0"
    assert str(parse_ref("u/r", "f.gguf")) == "u/r/f.gguf"
    with pytest.raises(UsageError, match="drop one"):
        parse_ref("u/r:Q8_0", "f.gguf")
