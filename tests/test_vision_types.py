"""Projectors of all types against torch: pixels of tiles, texts around them, embeddings; see `vision_models`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from projector_models import Model
from vision_models import Floats, answers, weights

from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig
from ikcli.vision.decode import Tile
from ikcli.vision.projector import Projector

NAMES = sorted(answers())
NOT_READ = ("image_min_pixels", "image_aspect_ratio")
"""Keys without which images are the same."""


def values(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), np.float32)


def spread(parts: list[Floats], n: int) -> Floats:
    """The values of which the answers have a part."""
    flat = np.concatenate([x.reshape(-1) for x in parts])
    return flat[:: max(len(flat) // n, 1)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def test_tiles_have_the_pixels_of_the_processor(model: Model) -> None:
    for size, truth in model.images.items():
        tiles = [one for one in model.pieces(size) if isinstance(one, Tile)]
        shapes = [[one.rgb.shape[2], *one.rgb.shape[:2]] for one in tiles]
        assert shapes == truth["tiles"]
        assert sum(model.projector.count(one) for one in tiles) == sum(truth["rows"])
        pixels = [model.projector.tower.normalized(one.rgb).transpose(2, 0, 1) for one in tiles]
        assert np.abs(spread(pixels, 64) - values(truth["pixels"])).max() < 1e-5


TEXTS = {
    "idefics3": "<fake_token_around_image><row_1_col_1>|<fake_token_around_image><row_1_col_2>|"
    "<fake_token_around_image><row_1_col_3>|\n<fake_token_around_image><row_2_col_1>|"
    "<fake_token_around_image><row_2_col_2>|<fake_token_around_image><row_2_col_3>|"
    "\n\n<fake_token_around_image><global-img>|<fake_token_around_image>",
    "llama4": "<|image_start|>|<|tile_x_separator|>|<|tile_x_separator|>|<|tile_y_separator|>|<|tile_x_separator|>|"
    "<|tile_x_separator|>|<|tile_y_separator|><|image|>|<|image_end|>",
    "internvl": "<img>|||||||</img>",
    "minicpmv": "<image>|</image><slice>|</slice><slice>|</slice>",
    "llava": "|",
    "llava_next": "||",
    "mlp_norm": "|",
    "ldp": "|",
    "ldpv2": "|",
    "janus": "<begin_of_image>|<end_of_image>",
    "lightonocr": "<|im_start|>|<|im_end|>",
    "dots_ocr": "<|img|>|<|endofimg|>",
    "minimax": "]<]start of image[>[|]<]end of image[>[",
    "exaone45": "<vision>|</vision>",
    "glm_edge": "|",
    "muse": "<|image_start|>|<|image_end|>",
    "cogvlm": "|",
    "minicpmv46": "<image>|</image><slice>|</slice><slice>|</slice>",
    "paddleocr": "<|IMAGE_START|>|<|IMAGE_END|>",
    "glm4v": "<|begin_of_image|>|<|end_of_image|>",
    "glm_ocr": "<|begin_of_image|>|<|end_of_image|>",
    "kimivl": "<|media_start|>|<|media_end|>",
    "kimik25": "<|media_begin|>|<|media_end|>",
    "lfm2": "<|image_start|><|img_row_1_col_1|>|<|img_row_1_col_2|>|<|img_row_1_col_3|>|<|img_row_2_col_1|>|"
    "<|img_row_2_col_2|>|<|img_row_2_col_3|>|<|img_thumbnail|>|<|image_end|>",
}
"""What stands around the tiles of an image, with | for a tile."""


def test_texts_around_tiles(model: Model) -> None:
    size = "1024x600" if model.name == "lfm2" else "150x90"
    found = "".join(one if isinstance(one, str) else "|" for one in model.pieces(size))
    assert found == TEXTS[model.name]


GLM4 = {"input_layernorm": "attn_norm", "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "norm": "output_norm",
        "embed_tokens": "token_embd"}  # fmt: skip


def write_glm4(path: Path, model: Model) -> None:
    """Write the text model, with pairs of queries and keys as converters put them for M-RoPE."""
    c = model.answers["config"]["text_config"]
    width, rotated = c["head_dim"], int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"])
    tensors = {}
    for name, shape in model.answers["shapes"].items():
        x = weights(name, tuple(shape))
        layer, kind = name.removeprefix("model.language_model.").rsplit(".", 1)
        if layer.endswith(("q_proj", "k_proj")):
            heads = x.reshape(-1, width, *x.shape[1:])
            parts = [heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]]
            x = np.concatenate(parts, axis=1).reshape(x.shape)
        if layer == "lm_head":
            tensors["output.weight"] = x
        elif layer.startswith("layers."):
            _, index, layer = layer.split(".", 2)
            tensors[f"blk.{index}.{GLM4[layer]}.{kind}"] = x
        elif layer in GLM4:
            tensors[f"{GLM4[layer]}.{kind}"] = x
    keys = {"block_count": c["num_hidden_layers"], "context_length": 256, "embedding_length": c["hidden_size"],
            "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
            "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": width,
            "attention.value_length": width, "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
            "rope.dimension_count": rotated, "rope.freq_base": 10000.0, "vocab_size": c["vocab_size"],
            "rope.dimension_sections": [*c["rope_parameters"]["mrope_section"], 0]}  # fmt: skip
    metadata = {"general.architecture": "glm4"} | {f"glm4.{key}": value for key, value in keys.items()}
    specs = [NewTensor(name, tuple(reversed(x.shape)), GGMLType.F32) for name, x in tensors.items()]
    with GGUFWriter(path, metadata, specs) as writer:
        for name, x in tensors.items():
            writer.write_tensor(name, np.ascontiguousarray(x).reshape(-1).view(np.uint8))


@pytest.mark.slow("runs a model and its tower")
def test_text_after_an_image_of_glm4v(tmp_path: Path) -> None:
    """Sections of the rotation lie in runs, and turn halves of heads."""
    model = Model("glm4v", tmp_path)
    write_glm4(tmp_path / "text.gguf", model)
    about = model.answers["text"]
    tile = next(one for one in model.pieces(about["image"]) if isinstance(one, Tile))
    media, start = model.projector.encode(tile), about["ids"].index(5)
    config = RunConfig(model=str(tmp_path / "text.gguf"), n_ctx=128, n_threads=2, n_threads_batch=2)
    with Session.open(config, media=model.projector.media_config) as session:
        batch = Batch.mixed([about["ids"][:start], media, about["ids"][start + len(media) :]], logits="none")
        batch.logits[-6:] = True
        logits = session.decode(batch).astype(np.float64)
    assert divergence(logits, about) < 1e-4


def divergence(logits: np.ndarray, about: dict[str, Any]) -> float:
    """The largest KL divergence of the last six rows."""
    found = logits - logits.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    truth = values(about["log_probabilities"]).reshape(6, -1).astype(np.float64)
    return float((np.exp(truth) * (truth - found)).sum(axis=1).max())


def after_images(name: str, tmp_path: Path, **settings: Any) -> float:
    """The divergence of text after images, of a converted checkpoint."""
    model = Model(name, tmp_path / "projector")
    tensors = {name: weights(name, tuple(shape)) for name, shape in model.answers["shapes"].items()}
    checkpoint = open_checkpoint(checkpoints.write_checkpoint(tmp_path / "text", model.answers["config"], tensors))
    path = tmp_path / "text.gguf"
    run(plan_convert(checkpoint, path, RecipeOptions(0), ToolOptions(n_threads=1)).job)
    about = model.answers["text"]
    tiles = [next(one for one in model.pieces(size) if isinstance(one, Tile)) for size in about["images"]]
    images = [model.projector.encode(tile) for tile in tiles]
    ids, parts = about["ids"], []
    while ids:
        n = next((i for i, token in enumerate(ids) if token < 0), len(ids))
        parts.append(ids[:n])
        if n < len(ids):
            parts.append(images.pop(0))
            n += len(parts[-1])
        ids = ids[n:]
    batch = Batch.mixed(parts, logits="none")
    batch.logits[-6:] = True
    settings = {"n_batch": 128, "warmup": False} | settings
    config = RunConfig(model=str(path), n_ctx=128, n_threads=2, n_threads_batch=2, **settings)
    with Session.open(config, media=model.projector.media_config) as session:
        return divergence(session.decode(batch).astype(np.float64), about)


@pytest.mark.slow("runs a model and its tower")
def test_text_after_an_image_of_minicpmv46(tmp_path: Path) -> None:
    """Sections of the rotation do not make positions of an image other than those of text."""
    assert after_images("minicpmv46", tmp_path, type_k="f32", type_v="f32") < 1e-5


@pytest.mark.slow("runs a model and its tower")
@pytest.mark.parametrize("n_ubatch", [128, 16])
def test_text_after_images_of_cogvlm(tmp_path: Path, n_ubatch: int) -> None:
    """Visual experts compute tokens of images but for the last; most of an image's tokens share one position."""
    assert after_images("cogvlm", tmp_path, n_ubatch=n_ubatch, type_k="f32", type_v="f32") < 1e-5


@pytest.mark.slow("runs a tower")
def test_the_other_file_of_minimax(tmp_path: Path) -> None:
    """ik_llama.cpp's files keep the order of the checkpoint and number the projectors otherwise."""
    model = Model("minimax", tmp_path)
    file, path = open_gguf(model.projector.path), tmp_path / "other.gguf"
    names = {"mm.1": "mm.0", "mm.2": "mm.2", "mm.merger.fc1": "mm.4", "mm.merger.fc2": "mm.6"}
    tensors = {}
    for name, t in file.tensors.items():
        data, (base, _, kind) = file.data(name).reshape(-1).view(np.uint8), name.rpartition(".")
        if base.endswith(("attn_q", "attn_k")):  # heads of [time | row | column | rest], of 6, 6, 6 and 2 columns
            rows = data.reshape(2, 20, -1)
            halves = rows[:, :18].reshape(2, 3, 2, 3, -1).swapaxes(1, 2).reshape(2, 18, -1)
            data = np.concatenate([halves, rows[:, 18:]], axis=1).reshape(-1)
        name = f"{names.get(base, base)}.{kind}"
        tensors[name] = NewTensor(name, tuple(t.shape), t.type), data
    metadata = {**file.typed_metadata(), "clip.projector_type": "minimax_m3_vl"}
    with GGUFWriter(path, metadata, [spec for spec, _ in tensors.values()]) as writer:
        for spec, data in tensors.values():
            writer.write_tensor(spec.name, np.ascontiguousarray(data))
    tile = next(one for one in model.pieces("61x47") if isinstance(one, Tile))
    other = Projector.open(path, model.hp, n_threads=2)
    truth, found = model.projector.encode(tile).rows, other.encode(tile).rows
    assert np.sqrt(np.square(found - truth).mean() / np.square(truth).mean()) < 1e-3  # keys are rounded to float16


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"clip.projector_type": "deepseekocr"},
            r"'deepseekocr' \(DeepSeek-OCR.*supported: qwen2vl_merger, .*idefics3",
        ),
        ({"clip.projector_type": "new"}, "'new' are not supported; supported: "),
        ({"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}, "encodes audio"),
    ],
    ids=["known", "unknown", "audio"],
)
def test_what_is_left_out(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    model = Model("ldpv2", tmp_path)
    file, path = open_gguf(model.projector.path), tmp_path / "other.gguf"
    with GGUFWriter(path, {**file.typed_metadata(), **keys}, []):
        pass
    with pytest.raises(UnsupportedError, match=says):
        Projector.open(path, model.hp)


def test_every_key_is_checked(model: Model, tmp_path: Path) -> None:
    """Values of the wrong kind and out of range are named; no value ends in another exception."""
    file = open_gguf(model.projector.path)
    specs = [NewTensor(name, tuple(t.shape), t.type) for name, t in file.tensors.items()]
    path = tmp_path / "changed.gguf"
    keys = [key for key in file.metadata if key.startswith("clip.vision.") and key != "clip.vision.projection_dim"]
    for key, value in [(key, value) for key in keys for value in (-1, "x", [0, -7], 1 << 30)]:
        with GGUFWriter(path, {**file.typed_metadata(), key: value}, specs) as writer:
            for spec in specs:
                writer.write_tensor(spec.name, file.data(spec.name).reshape(-1).view(np.uint8))
        try:
            Projector.open(path, model.hp).close()
        except IkError as e:
            assert str(path) in str(e) and "\n" not in str(e)
        else:
            assert key.endswith(NOT_READ), f"{key} = {value}"


@pytest.mark.slow("compiles the kernels of towers")
def test_embeddings(model: Model) -> None:
    for size, truth in model.images.items():
        rows = [model.projector.encode(one).rows for one in model.pieces(size) if isinstance(one, Tile)]
        found, wanted = spread(rows, 96), values(truth["embeddings"])
        assert found.shape == wanted.shape
        most = 2e-3 if model.name == "muse" else 1e-3  # keys and values are rounded in five layers
        assert np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()) < most
