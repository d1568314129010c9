"""Projectors of checkpoints: files of the established converter, taken apart into checkpoints and converted again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import write_safetensors

from ikcli.convert.projector import open_projector
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.main import main

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vision"
Values = npt.NDArray[Any]
Tensors = dict[str, Values]


def read(file: GGUFFile) -> Tensors:
    """The tensors in their order, with the slowest dimension first."""
    kinds = {GGMLType.F32: np.float32, GGMLType.F16: np.float16}
    return {
        name: file.data(name).reshape(-1).view(kinds[t.type]).reshape(tuple(reversed(t.shape)))
        for name, t in file.tensors.items()
    }


def renamed(name: str, *rules: tuple[str, str]) -> str:
    for pattern, new in rules:
        found, n = re.subn(pattern, new, name)
        if n:
            return found
    raise AssertionError(name)


QWEN = (
    (r"^v\.blk\.(\d+)\.attn_out", r"visual.blocks.\1.attn.proj"),
    (r"^v\.blk\.(\d+)\.ffn_(\w+)", r"visual.blocks.\1.mlp.\2_proj"),
    (r"^v\.blk\.(\d+)\.ln(\d)", r"visual.blocks.\1.norm\2"), (r"^v\.post_ln", "visual.merger.ln_q"),
    (r"^mm\.(\d)", r"visual.merger.mlp.\1"),
)  # fmt: skip
QWEN3 = (
    (r"^v\.blk\.(\d+)\.attn_out", r"model.visual.blocks.\1.attn.proj"),
    (r"^v\.blk\.(\d+)\.attn_qkv", r"model.visual.blocks.\1.attn.qkv"),
    (r"^v\.blk\.(\d+)\.ffn_up", r"model.visual.blocks.\1.mlp.linear_fc1"),
    (r"^v\.blk\.(\d+)\.ffn_down", r"model.visual.blocks.\1.mlp.linear_fc2"),
    (r"^v\.blk\.(\d+)\.ln(\d)", r"model.visual.blocks.\1.norm\2"), (r"^v\.post_ln", "model.visual.merger.norm"),
    (r"^v\.deepstack\.0\.norm", "model.visual.deepstack_merger_list.0.norm"),
    (r"^v\.deepstack\.2\.norm", "model.visual.deepstack_merger_list.1.norm"),
    (r"^v\.deepstack\.0\.", "model.visual.deepstack_merger_list.0.linear_"),
    (r"^v\.deepstack\.2\.", "model.visual.deepstack_merger_list.1.linear_"),
    (r"^mm\.0", "model.visual.merger.linear_fc1"), (r"^mm\.2", "model.visual.merger.linear_fc2"),
    (r"^v\.patch_embd\.bias", "model.visual.patch_embed.proj.bias"), (r"^v\.position_embd", "model.visual.pos_embed"),
)  # fmt: skip
SIGLIP = "vision_tower.vision_model."
GEMMA3 = (
    (r"^mm\.input_projection.weight", "multi_modal_projector.mm_input_projection_weight"),
    (r"^mm\.soft_emb_norm", "multi_modal_projector.mm_soft_emb_norm"),
    (r"^v\.patch_embd", SIGLIP + "embeddings.patch_embedding"),
    (r"^v\.position_embd", SIGLIP + "embeddings.position_embedding"),
    (r"^v\.post_ln", SIGLIP + "post_layernorm"),
    (r"^v\.blk\.(\d+)\.ln(\d)", SIGLIP + r"encoder.layers.\1.layer_norm\2"),
    (r"^v\.blk\.(\d+)\.ffn_up", SIGLIP + r"encoder.layers.\1.mlp.fc1"),
    (r"^v\.blk\.(\d+)\.ffn_down", SIGLIP + r"encoder.layers.\1.mlp.fc2"),
    (r"^v\.blk\.(\d+)\.attn_(out|q|k|v)", SIGLIP + r"encoder.layers.\1.self_attn.\2_proj"),
)  # fmt: skip
PIXTRAL = (
    (r"^mm\.(\d)", r"multi_modal_projector.linear_\1"), (r"^mm\.input_norm", "multi_modal_projector.norm"),
    (r"^mm\.patch_merger", "multi_modal_projector.patch_merger.merging_layer"), (r"^v\.pre_ln", "vision_tower.ln_pre"),
    (r"^v\.patch_embd", "vision_tower.patch_conv"),
    (r"^v\.blk\.(\d+)\.ln1", r"vision_tower.transformer.layers.\1.attention_norm"),
    (r"^v\.blk\.(\d+)\.ln2", r"vision_tower.transformer.layers.\1.ffn_norm"),
    (r"^v\.blk\.(\d+)\.attn_out", r"vision_tower.transformer.layers.\1.attention.o_proj"),
    (r"^v\.blk\.(\d+)\.attn_(\w)", r"vision_tower.transformer.layers.\1.attention.\2_proj"),
    (r"^v\.blk\.(\d+)\.ffn_(\w+)", r"vision_tower.transformer.layers.\1.feed_forward.\2_proj"),
)  # fmt: skip
INTERN = (
    (r"^mm\.model\.mlp\.0", "model.multi_modal_projector.layer_norm"),
    (r"^mm\.model\.mlp\.1", "model.multi_modal_projector.linear_1"),
    (r"^mm\.model\.mlp\.3", "model.multi_modal_projector.linear_2"),
    (r"^v\.class_embd", "model.vision_tower.embeddings.cls_token"),
    (r"^v\.patch_embd", "model.vision_tower.embeddings.patch_embeddings.projection"),
    (r"^v\.position_embd\.weight", "model.vision_tower.embeddings.position_embeddings"),
    (r"^v\.blk\.(\d+)\.attn_out", r"model.vision_tower.encoder.layer.\1.attention.projection_layer"),
    (r"^v\.blk\.(\d+)\.attn_(\w)", r"model.vision_tower.encoder.layer.\1.attention.\2_proj"),
    (r"^v\.blk\.(\d+)\.ls(\d)\.weight", r"model.vision_tower.encoder.layer.\1.lambda_\2"),
    (r"^v\.blk\.(\d+)\.ln1", r"model.vision_tower.encoder.layer.\1.layernorm_before"),
    (r"^v\.blk\.(\d+)\.ln2", r"model.vision_tower.encoder.layer.\1.layernorm_after"),
    (r"^v\.blk\.(\d+)\.ffn_up", r"model.vision_tower.encoder.layer.\1.mlp.fc1"),
    (r"^v\.blk\.(\d+)\.ffn_down", r"model.vision_tower.encoder.layer.\1.mlp.fc2"),
)  # fmt: skip
G4 = r"model.vision_tower.encoder.layers.\1."
GEMMA4 = (
    (r"^mm\.input_projection", "model.embed_vision.embedding_projection"),
    (r"^v\.blk\.(\d+)\.ln1", G4 + "input_layernorm"), (r"^v\.blk\.(\d+)\.ln2", G4 + "pre_feedforward_layernorm"),
    (r"^v\.blk\.(\d+)\.attn_post_norm", G4 + "post_attention_layernorm"),
    (r"^v\.blk\.(\d+)\.ffn_post_norm", G4 + "post_feedforward_layernorm"),
    (r"^v\.blk\.(\d+)\.attn_(\w)_norm", G4 + r"self_attn.\2_norm"),
    (r"^v\.blk\.(\d+)\.attn_out", G4 + "self_attn.o_proj.linear"),
    (r"^v\.blk\.(\d+)\.attn_(\w)\.", G4 + r"self_attn.\2_proj.linear."),
    (r"^v\.blk\.(\d+)\.ffn_(\w+)\.", G4 + r"mlp.\2_proj.linear."),
    (r"^v\.position_embd\.weight", "model.vision_tower.patch_embedder.position_embedding_table"),
)  # fmt: skip


def frames(tensors: Tensors, name: str) -> Tensors:
    """Join the patches of two frames again."""
    first, second = tensors.pop("v.patch_embd.weight"), tensors.pop("v.patch_embd.weight.1")
    return {name: np.stack([first, second], axis=2)}


def qwen25vl(t: Tensors) -> Tensors:
    out = frames(t, "visual.patch_embed.proj.weight")
    for kind in ("weight", "bias"):
        for i in range(4):
            parts = [t.pop(f"v.blk.{i}.attn_{x}.{kind}") for x in "qkv"]
            out[f"visual.blocks.{i}.attn.qkv.{kind}"] = np.concatenate(parts)
    return out | {renamed(name, *QWEN): x for name, x in t.items()}


def qwen3vl(t: Tensors) -> Tensors:
    out = frames(t, "model.visual.patch_embed.proj.weight")
    return out | {renamed(name, *QWEN3): x for name, x in t.items()}


def gemma3(t: Tensors) -> Tensors:
    t["mm.soft_emb_norm.weight"] = t["mm.soft_emb_norm.weight"] - np.float32(1)
    return {renamed(name, *GEMMA3): x for name, x in t.items()}


def mistral3(t: Tensors) -> Tensors:
    row = t.pop("v.token_embd.img_break")
    out = {"language_model.model.embed_tokens.weight": np.stack([row * 0, row, row * 2]).astype(np.float16)}
    for name, x in t.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # halves of heads again
            x = x.reshape(2, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        out[renamed(name, *PIXTRAL)] = x
    return out


def gemma4(t: Tensors) -> Tensors:
    patches = t.pop("v.patch_embd.weight")
    flat = np.ascontiguousarray(patches.transpose(0, 2, 3, 1)).reshape(len(patches), -1)
    out = {"model.vision_tower.patch_embedder.input_proj.weight": flat}
    return out | {renamed(name, *GEMMA4): x for name, x in t.items()}


VISION = {"image_size": 224, "patch_size": 14, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 2}  # fmt: skip
CONFIGS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], dict[str, Any]]] = {
    "qwen25vl": (qwen25vl, {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}, {
        "depth": 4, "hidden_size": 64, "num_heads": 2, "patch_size": 14, "intermediate_size": 96,
        "fullatt_block_indexes": [1, 3]}),
    "qwen3vl": (qwen3vl, {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}, {
        "depth": 4, "hidden_size": 48, "num_heads": 3, "patch_size": 16, "intermediate_size": 96,
        "num_position_embeddings": 144, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 2]}),
    "gemma3": (gemma3, {"architectures": ["Gemma3ForConditionalGeneration"]}, VISION),
    "mistral3": (mistral3, {"architectures": ["Mistral3ForConditionalGeneration"], "spatial_merge_size": 2},
                 VISION | {"model_type": "pixtral", "image_size": 1540, "hidden_act": "silu"}),
    "internvl": (lambda t: {renamed(name, *INTERN): x for name, x in t.items()},
                 {"architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5},
                 VISION | {"num_hidden_layers": 4, "image_size": [224, 224], "patch_size": [14, 14],
                           "intermediate_size": 128, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}),
    "gemma4": (gemma4, {"architectures": ["Gemma4ForConditionalGeneration"]},
               VISION | {"num_hidden_layers": 2, "patch_size": 16}),
}  # fmt: skip


@pytest.fixture(params=sorted(CONFIGS))
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GGUFFile, Path]:
    """A file of the established converter, and a checkpoint that has its values."""
    path = GOLDEN / f"{request.param}.mmproj.gguf"
    if not path.is_file():
        pytest.skip("the models with images are not here")
    file = open_gguf(path)
    inverse, config, vision = CONFIGS[request.param]
    folder = tmp_path / "zoo"
    folder.mkdir()
    tensors = inverse(read(file)) | {"model.language_model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float16)}
    sorted_ones = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    write_safetensors(folder / "model.safetensors", sorted_ones)
    text = {"text_config": {"hidden_size": file.metadata["clip.vision.projection_dim"], "rms_norm_eps": 1e-6}}
    (folder / "config.json").write_text(json.dumps(config | text | {"vision_config": vision}))
    processor = {key: file.metadata[f"clip.vision.{key}"] for key in ("image_mean", "image_std")}
    processor = {key: [float(x) for x in value] for key, value in processor.items()}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_seq_length": 16}))
    added = {"1": {"content": "[IMG_BREAK]"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return file, folder


def test_projectors_are_those_of_the_established_converter(golden: tuple[GGUFFile, Path]) -> None:
    file, folder = golden
    out = folder / "made.gguf"
    line = ["convert", str(folder), "--mmproj", "--outtype", "f16", "--model-name", "zoo", "--outfile", str(out)]
    assert main(line) == 0
    assert out.read_bytes() == file.paths[0].read_bytes()


@pytest.mark.parametrize("outtype", ["f32", "bf16"])
def test_other_float_types(golden: tuple[GGUFFile, Path], outtype: str) -> None:
    file, folder = golden
    found = open_projector(folder, outtype)
    found.write(folder / "made.gguf")
    made = open_gguf(folder / "made.gguf")
    wanted = GGMLType.F32 if outtype == "f32" else GGMLType.BF16
    for name, values in read(file).items():
        kind = made.tensors[name].type
        assert kind in (GGMLType.F32, wanted, GGMLType.F16 if "input_projection" in name else wanted)
        if kind == GGMLType.F32:
            have = made.data(name).reshape(-1).view(np.float32)
            assert np.array_equal(have, values.astype(np.float32).reshape(-1))


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    cases = {
        "the projector of LlamaForCausalLM is not converted": {"architectures": ["LlamaForCausalLM"]},
        "vision_config is missing": {"architectures": ["Gemma3ForConditionalGeneration"]},
    }
    for text, config in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(IkError, match=text):
            open_projector(tmp_path)
