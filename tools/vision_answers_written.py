"""Models of `vision_answers` that transformers does not have: their published code, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from vision_answers_shared import TEXT, Found, Weights, biased, sample
from vision_models import image, weights


def clip_tower(m: Weights, pixels: torch.Tensor, n: int, n_head: int, patch: int, n_layer: int) -> torch.Tensor:
    """Return what a tower of CLIP makes of pixels; its tensors have the names of projector files, ffn swapped."""
    f = torch.nn.functional
    x = f.conv2d(pixels[None], m.w["v.patch_embd.weight"], stride=patch)[0].flatten(1).T
    x = torch.cat([m.w["v.class_embd"][None], x]) + m.w["v.position_embd.weight"]
    x = m.norm(x, "v.pre_ln", 1e-5)
    for i in range(n_layer):
        b = f"v.blk.{i}."
        y = m.norm(x, f"{b}ln1", 1e-5)
        parts = [m.linear(y, f"{b}attn_{k}").reshape(len(x), n_head, -1).transpose(0, 1) for k in "qkv"]
        y = f.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(len(x), n)
        x = x + m.linear(y, f"{b}attn_out")
        y = m.linear(m.norm(x, f"{b}ln2", 1e-5), f"{b}ffn_down")
        x = x + m.linear(y * torch.sigmoid(1.702 * y), f"{b}ffn_up")
    return x[1:]


def minicpmv() -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute MiniCPM-V 2.6 as the code beside its checkpoint does."""
    n, n_head, ff, patch, side, table, d, n_query = 32, 2, 44, 14, 112, 10, 256, 5
    block = {"layer_norm1": (n,), "layer_norm2": (n,), "mlp.fc1": (ff, n), "mlp.fc2": (n, ff)}
    block |= {f"self_attn.{name}_proj": (n, n) for name in ("q", "k", "v", "out")}
    layers = {"vpm.embeddings.patch_embedding": (n, 3, patch, patch), "vpm.post_layernorm": (n,),
              "resampler.ln_q": (d,), "resampler.ln_kv": (d,), "resampler.ln_post": (d,),
              "resampler.attn.out_proj": (d, d)}  # fmt: skip
    layers |= {f"vpm.encoder.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    shapes = biased(layers) | {"vpm.embeddings.position_embedding.weight": (table * table, n),
                               "resampler.query": (n_query, d), "resampler.kv_proj.weight": (d, n),
                               "resampler.proj": (d, d), "resampler.attn.in_proj_weight": (3 * d, d),
                               "resampler.attn.in_proj_bias": (3 * d,)}  # fmt: skip
    vision = {"hidden_size": n, "num_attention_heads": n_head, "num_hidden_layers": 2, "intermediate_size": ff,
              "patch_size": patch, "image_size": table * patch}  # fmt: skip
    config = {"architectures": ["MiniCPMV"], "version": 2.6, "image_size": side, "query_num": n_query,
              "vision_config": vision, "hidden_size": d}  # fmt: skip
    m = Weights(shapes, config, {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3})
    slices = tf.MiniCPMV4_6ImageProcessor(scale_resolution=side, patch_size=patch)
    slices.find_best_resize.__func__.__globals__["ensure_divide"] = lambda x, y: max(
        round(x / (y if y < patch else patch)) * (y if y < patch else patch), y if y < patch else patch
    )  # whole patches, as in 2.6

    def waves(h: int, w: int) -> torch.Tensor:
        omega = 1.0 / 10000 ** (np.arange(d // 4, dtype=np.float32) / (d / 4.0))
        row, col = np.divmod(np.arange(h * w), w)
        parts = [f(np.einsum("m,d->md", at, omega)) for at in (col, row) for f in (np.sin, np.cos)]
        return torch.from_numpy(np.concatenate(parts, axis=1)).float()

    def encode(pixels: torch.Tensor) -> np.ndarray:
        h, w = pixels.shape[1] // patch, pixels.shape[2] // patch
        bounds = torch.arange(1 / table, 1.0, 1 / table)
        rows, cols = (torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / k), bounds, right=True) for k in (h, w))
        name = "vpm.embeddings.patch_embedding"
        x = torch.nn.functional.conv2d(pixels[None], m.w[f"{name}.weight"], m.w[f"{name}.bias"], stride=patch)
        positions = m.w["vpm.embeddings.position_embedding.weight"]
        x = x[0].flatten(1).T + positions[(rows[:, None] * table + cols).flatten()]
        for i in range(2):
            b = f"vpm.encoder.layers.{i}."
            y = m.norm(x, f"{b}layer_norm1", 1e-6)
            parts = [m.linear(y, f"{b}self_attn.{k}_proj").reshape(len(x), n_head, -1).transpose(0, 1) for k in "qkv"]
            y = torch.nn.functional.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(len(x), n)
            x = x + m.linear(y, f"{b}self_attn.out_proj")
            y = m.linear(m.norm(x, f"{b}layer_norm2", 1e-6), f"{b}mlp.fc1")
            x = x + m.linear(torch.nn.functional.gelu(y, approximate="tanh"), f"{b}mlp.fc2")
        x = m.linear(m.norm(x, "vpm.post_layernorm", 1e-6), "resampler.kv_proj")
        x = m.norm(x, "resampler.ln_kv", 1e-6)
        q = m.norm(m.w["resampler.query"], "resampler.ln_q", 1e-6)
        y, _ = torch.nn.functional.multi_head_attention_forward(
            q[:, None], (x + waves(h, w))[:, None], x[:, None], d, d // 128, m.w["resampler.attn.in_proj_weight"],
            m.w["resampler.attn.in_proj_bias"], None, None, False, 0.0, m.w["resampler.attn.out_proj.weight"],
            m.w["resampler.attn.out_proj.bias"], training=False)  # fmt: skip
        return (m.norm(y[:, 0], "resampler.ln_post", 1e-6) @ m.w["resampler.proj"]).numpy()

    def run(rgb: np.ndarray) -> Found:
        made = slices([Image.fromarray(rgb)], return_tensors="pt")
        pixels, at = [], 0
        for h, w in made["target_sizes"].tolist():
            cut = made["pixel_values"][0][:, :, at * patch : (at + h * w) * patch].reshape(3, patch, h, w, patch)
            pixels.append(cut.permute(0, 2, 1, 3, 4).reshape(3, h * patch, w * patch))
            at += h * w
        return [x.numpy() for x in pixels], [encode(x) for x in pixels], list(made["grids"][0])

    return m, run


def mobilevlm(kind: str) -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute MobileVLM's projectors as its code does: `mlp_norm` is LLaVA's with Yi."""
    from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig

    n, n_head, ff, patch, size, out = 32, 2, 44, 14, 56, 40
    layers = {"v.pre_ln": (n,)}
    for i in range(2):
        layers |= {f"v.blk.{i}.{k}": (n, n) for k in ("attn_q", "attn_k", "attn_v", "attn_out")}
        layers |= {f"v.blk.{i}.{k}": (n,) for k in ("ln1", "ln2")}
        layers |= {f"v.blk.{i}.ffn_down": (ff, n), f"v.blk.{i}.ffn_up": (n, ff)}
    shapes = {"v.patch_embd.weight": (n, 3, patch, patch), "v.class_embd": (n,), "v.position_embd.weight": (17, n)}
    if kind == "mlp_norm":
        layers |= {"mm.0": (36, n), "mm.1": (36,), "mm.3": (out, 36), "mm.4": (out,)}
    elif kind == "ldpv2":
        layers |= {"mm.model.mlp.0": (out, n), "mm.model.mlp.2": (out, out), "mm.model.peg.0": (out, 1, 3, 3)}
    else:
        layers |= {"mm.model.mlp.1": (out, n), "mm.model.mlp.3": (out, out)}
        for i in (1, 2):
            b = f"mm.model.mb_block.{i}.block"
            layers |= {f"{b}.0.1": (out,), f"{b}.2.1": (out,)}
            layers |= {f"{b}.1.fc1": (16, out, 1, 1), f"{b}.1.fc2": (out, 16, 1, 1)}
            shapes |= {f"{b}.0.0.weight": (out, 1, 3, 3), f"{b}.2.0.weight": (out, out, 1, 1)}
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    m = Weights(shapes | biased(layers), {"text_config": TEXT}, {})
    v = "clip.vision."
    m.metadata = {"general.architecture": "clip", "clip.has_vision_encoder": True,
                  "clip.projector_type": "mlp" if kind == "mlp_norm" else kind, f"{v}image_size": size,
                  f"{v}patch_size": patch, f"{v}embedding_length": n, f"{v}feed_forward_length": ff,
                  f"{v}projection_dim": 768, f"{v}attention.head_count": n_head, f"{v}block_count": 2,
                  f"{v}attention.layer_norm_epsilon": 1e-5, f"{v}image_mean": mean, f"{v}image_std": std,
                  "clip.use_gelu": False}  # fmt: skip
    square = {"height": size, "width": size}
    processor = tf.LlavaImageProcessor(do_pad=True, size={"shortest_edge": size}, crop_size=square)

    class Channels(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def residual(i: int) -> torch.nn.Module:
        about = InvertedResidualConfig(out, 3, out, out, True, "HS", i, 1, 1)
        found = InvertedResidual(about, lambda k: Channels(k, eps=1e-6)).eval()
        prefix = f"mm.model.mb_block.{i}."
        found.load_state_dict({k.removeprefix(prefix): x for k, x in m.w.items() if k.startswith(prefix)})
        return found

    def run(rgb: np.ndarray) -> Found:
        pixels = processor([Image.fromarray(rgb)], return_tensors="pt")["pixel_values"][0]
        x, gelu = clip_tower(m, pixels, n, n_head, patch, 2), torch.nn.functional.gelu
        if kind == "mlp_norm":
            x = m.norm(m.linear(gelu(m.norm(m.linear(x, "mm.0"), "mm.1", 1e-5)), "mm.3"), "mm.4", 1e-5)
            return [pixels.numpy()], [x.numpy()], []
        first = 0 if kind == "ldpv2" else 1
        x = m.linear(gelu(m.linear(x, f"mm.model.mlp.{first}")), f"mm.model.mlp.{first + 2}")
        x = x.T.reshape(1, out, 4, 4)
        if kind == "ldpv2":
            x = torch.nn.functional.adaptive_avg_pool2d(x, (2, 2))
            name = "mm.model.peg.0"
            x = x + torch.nn.functional.conv2d(x, m.w[f"{name}.weight"], m.w[f"{name}.bias"], padding=1, groups=out)
        else:
            x = residual(2)(residual(1)(x))
        return [pixels.numpy()], [x.flatten(2)[0].T.numpy()], []

    return m, run


def janus() -> tuple[Any, Callable[[np.ndarray], Found]]:
    from transformers.models.janus import modeling_janus

    vision = {"hidden_size": 32, "mlp_ratio": 1.5, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
              "patch_size": 14, "hidden_act": "gelu", "projection_dim": 40, "depth": 2, "num_image_tokens": 16,
              "layer_norm_eps": 1e-6, "attention_bias": True, "use_qk_norm": False}  # fmt: skip
    about = modeling_janus.JanusVisionConfig(**vision)
    parts = {"model.vision_model.": modeling_janus.JanusVisionModel._from_config(about),
             "model.aligner.": modeling_janus.JanusVisionAlignerMLP(about)}  # fmt: skip
    shapes = {}
    for prefix, part in parts.items():
        part.float().eval()
        for name, x in part.state_dict().items():
            shapes[prefix + name] = tuple(x.shape)
            x.copy_(torch.from_numpy(weights(prefix + name, tuple(x.shape))))
    processor = tf.JanusImageProcessor(size={"height": 56, "width": 56}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    config = {"architectures": ["JanusForConditionalGeneration"], "vision_config": vision, "text_config": TEXT}
    m = Weights(shapes, config, processor.to_dict())

    def run(rgb: np.ndarray) -> Found:
        pixels = processor([Image.fromarray(rgb)], return_tensors="pt")["pixel_values"]
        rows = parts["model.aligner."](parts["model.vision_model."](pixels).last_hidden_state)
        return list(pixels.numpy()), list(rows.numpy()), []

    return m, run


def dots_ocr() -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute dots.ocr's tower as the code beside its checkpoint does."""
    n, n_head, ff, patch, out = 32, 2, 44, 14, 40
    tower, f = "vision_tower.", torch.nn.functional
    norms = {f"{tower}patch_embed.patchifier.norm", f"{tower}post_trunk_norm"}
    shapes = biased({f"{tower}patch_embed.patchifier.proj": (n, 3, patch, patch), f"{tower}merger.ln_q": (n,),
                     f"{tower}merger.mlp.0": (4 * n, 4 * n), f"{tower}merger.mlp.2": (out, 4 * n)})  # fmt: skip
    for i in range(2):
        norms |= {f"{tower}blocks.{i}.norm{j}" for j in (1, 2)}
        block = {
            "attn.qkv": (3 * n, n),
            "attn.proj": (n, n),
            "mlp.fc1": (ff, n),
            "mlp.fc2": (n, ff),
            "mlp.fc3": (ff, n),
        }
        shapes |= {f"{tower}blocks.{i}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {f"{name}.weight": (n,) for name in norms}
    vision = {"embed_dim": n, "hidden_size": out, "intermediate_size": ff, "num_hidden_layers": 2, "patch_size": patch,
              "num_attention_heads": n_head, "spatial_merge_size": 2, "rms_norm_eps": 1e-5}  # fmt: skip
    config = {"architectures": ["DotsOCRForCausalLM"], "vision_config": vision, **TEXT}
    processor = tf.Qwen2VLImageProcessor(min_pixels=3136, max_pixels=11289600, temporal_patch_size=1)
    m = Weights(shapes, config, processor.to_dict() | {"min_pixels": 3136, "max_pixels": 11289600})

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return f.rms_norm(x, (n,), m.w[f"{tower}{name}.weight"], 1e-5)

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        _, h, w = made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"]
        conv = m.w[f"{tower}patch_embed.patchifier.proj.weight"].reshape(n, -1)
        x = rms(pixels @ conv.T + m.w[f"{tower}patch_embed.patchifier.proj.bias"], "patch_embed.patchifier.norm")
        at = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        at = at.reshape(h // 2, 2, w // 2, 2, 2).permute(0, 2, 1, 3, 4).reshape(-1, 2)
        d = n // n_head
        freq = 10000.0 ** (-torch.arange(0, d // 2, 2) / (d // 2))
        angle = (at[:, :, None] * freq).flatten(1).repeat(1, 2)[:, None]

        def rotate(y: torch.Tensor) -> torch.Tensor:
            return y * angle.cos() + torch.cat([-y[..., d // 2 :], y[..., : d // 2]], -1) * angle.sin()

        for i in range(2):
            b = f"{tower}blocks.{i}."
            q, k, v = m.linear(rms(x, f"blocks.{i}.norm1"), f"{b}attn.qkv").reshape(len(x), 3, n_head, d).unbind(1)
            parts = (y.transpose(0, 1) for y in (rotate(q), rotate(k), v))
            x = x + m.linear(f.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(len(x), n), f"{b}attn.proj")
            y = rms(x, f"blocks.{i}.norm2")
            x = x + m.linear(f.silu(m.linear(y, f"{b}mlp.fc1")) * m.linear(y, f"{b}mlp.fc3"), f"{b}mlp.fc2")
        x = m.norm(rms(x, "post_trunk_norm"), f"{tower}merger.ln_q", 1e-6).reshape(-1, 4 * n)
        x = m.linear(f.gelu(m.linear(x, f"{tower}merger.mlp.0")), f"{tower}merger.mlp.2")
        pixels = pixels.numpy().reshape(h // 2, w // 2, 2, 2, 3, 14, 14).transpose(4, 0, 2, 5, 1, 3, 6)
        return [pixels.reshape(3, h * 14, w * 14)], [x.numpy()], [h, w]

    return m, run


def cogvlm() -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute CogVLM, its text model too, as the code beside its checkpoint does."""
    n, n_head, ff, patch, size, out, out_ff, vocab = 32, 2, 44, 14, 56, 40, 56, 320
    v, f = "model.vision.", torch.nn.functional
    block = {"input_layernorm": (n,), "post_attention_layernorm": (n,), "attention.query_key_value": (3 * n, n),
             "attention.dense": (n, n), "mlp.fc1": (ff, n), "mlp.fc2": (n, ff)}  # fmt: skip
    shapes = biased(
        {f"{v}transformer.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
        | {f"{v}patch_embedding.proj": (n, 3, patch, patch), f"{v}linear_proj.norm1": (out,)}
    )
    shapes |= {f"{v}patch_embedding.cls_embedding": (1, n), f"{v}patch_embedding.position_embedding.weight": (17, n),
               f"{v}boi": (1, 1, out), f"{v}eoi": (1, 1, out), f"{v}linear_proj.linear_proj.weight": (out, n),
               f"{v}linear_proj.dense_h_to_4h.weight": (out_ff, out), f"{v}linear_proj.gate_proj.weight": (out_ff, out),
               f"{v}linear_proj.dense_4h_to_h.weight": (out, out_ff), "model.embed_tokens.weight": (vocab, out),
               "model.norm.weight": (out,), "lm_head.weight": (vocab, out)}  # fmt: skip
    for b in (f"model.layers.{i}." for i in range(2)):
        shapes |= {f"{b}{name}.weight": (out,) for name in ("input_layernorm", "post_attention_layernorm")}
        for which in ("language", "vision"):
            shapes |= {f"{b}self_attn.{which}_expert_query_key_value.weight": (3 * out, out),
                       f"{b}self_attn.{which}_expert_dense.weight": (out, out),
                       f"{b}mlp.{which}_mlp.gate_proj.weight": (out_ff, out),
                       f"{b}mlp.{which}_mlp.up_proj.weight": (out_ff, out),
                       f"{b}mlp.{which}_mlp.down_proj.weight": (out, out_ff)}  # fmt: skip
    vision = {"hidden_size": n, "intermediate_size": ff, "num_hidden_layers": 2, "num_heads": n_head, "dropout_prob": 0,
              "image_size": size, "patch_size": patch, "num_positions": 17, "hidden_act": "gelu", "in_channels": 3,
              "layer_norm_eps": 1e-6}  # fmt: skip
    config = {"architectures": ["CogVLMForCausalLM"], "vision_config": vision, "hidden_size": out, "hidden_act": "silu",
              "intermediate_size": out_ff, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": vocab,
              "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
              "pad_token_id": 0, "template_version": "chat", "tie_word_embeddings": False}  # fmt: skip
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    m = Weights(shapes, config, {})

    def encoded(rgb: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        small = np.array(Image.fromarray(rgb).resize((size, size), Image.Resampling.BICUBIC)).astype(np.float32) / 255
        pixels = torch.from_numpy((small - np.float32(mean)) / np.float32(std)).permute(2, 0, 1)
        name = f"{v}patch_embedding"
        x = f.conv2d(pixels[None], m.w[f"{name}.proj.weight"], m.w[f"{name}.proj.bias"], patch)[0].flatten(1).T
        x = torch.cat([m.w[f"{name}.cls_embedding"], x]) + m.w[f"{name}.position_embedding.weight"]
        for i in range(2):
            b = f"{v}transformer.layers.{i}."
            qkv = m.linear(x, f"{b}attention.query_key_value").reshape(len(x), 3, n_head, -1)
            y = f.scaled_dot_product_attention(*(part.transpose(0, 1) for part in qkv.unbind(1)))
            y = m.linear(y.transpose(0, 1).reshape(len(x), n), f"{b}attention.dense")
            x = x + m.norm(y, f"{b}input_layernorm", 1e-6)
            y = m.linear(f.gelu(m.linear(x, f"{b}mlp.fc1")), f"{b}mlp.fc2")
            x = x + m.norm(y, f"{b}post_attention_layernorm", 1e-6)
        p = f"{v}linear_proj."
        x = f.gelu(m.norm(m.linear(x[1:], f"{p}linear_proj"), f"{p}norm1", 1e-5))
        x = m.linear(f.silu(m.linear(x, f"{p}gate_proj")) * m.linear(x, f"{p}dense_h_to_4h"), f"{p}dense_4h_to_h")
        return pixels, torch.cat([m.w[f"{v}boi"][0], x, m.w[f"{v}eoi"][0]])

    def logits(ids: list[int], rows: torch.Tensor) -> torch.Tensor:
        given = torch.tensor(ids) < 0
        x = m.w["model.embed_tokens.weight"][torch.tensor(ids).clamp(min=0)]
        x[given] = rows
        visual = given.clone()
        visual[:-1] &= given[1:]  # the last token of an image is computed as text
        inside = given.clone()
        inside[:-1] &= given[1:]
        inside[1:] &= given[:-1]
        steps = torch.ones(len(ids), dtype=torch.long)
        steps[1:] = (~inside[1:] | ~inside[:-1]).long()
        at, d = steps.cumsum(0) - 1, out // 2
        angle = (at[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)[:, None]

        def mixed(y: torch.Tensor, pattern: str) -> torch.Tensor:
            found = m.linear(y, pattern.format("language"))
            found[visual] = m.linear(y[visual], pattern.format("vision"))
            return found

        def rotated(y: torch.Tensor) -> torch.Tensor:
            return y * angle.cos() + torch.cat([-y[..., d // 2 :], y[..., : d // 2]], -1) * angle.sin()

        for i in range(2):
            b = f"model.layers.{i}."
            y = f.rms_norm(x, (out,), m.w[f"{b}input_layernorm.weight"], 1e-5)
            q, k, value = mixed(y, b + "self_attn.{}_expert_query_key_value").reshape(len(x), 3, 2, d).unbind(1)
            parts = (part.transpose(0, 1) for part in (rotated(q), rotated(k), value))
            y = f.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).reshape(len(x), out)
            x = x + mixed(y, b + "self_attn.{}_expert_dense")
            y = f.rms_norm(x, (out,), m.w[f"{b}post_attention_layernorm.weight"], 1e-5)
            y = f.silu(mixed(y, b + "mlp.{}_mlp.gate_proj")) * mixed(y, b + "mlp.{}_mlp.up_proj")
            x = x + mixed(y, b + "mlp.{}_mlp.down_proj")
        return m.linear(f.rms_norm(x, (out,), m.w["model.norm.weight"], 1e-5), "lm_head")

    def run(rgb: np.ndarray) -> Found:
        pixels, rows = encoded(rgb)
        return [pixels.numpy()], [rows.numpy()], []

    ids = [0, 11, 12, *[-1] * 18, 20, 21, *[-1] * 18, 22, 23, 24, 25]
    rows = torch.cat([encoded(image(*size))[1] for size in ((61, 47), (150, 90))])
    found = logits(ids, rows)[-6:].log_softmax(-1)
    m.text = {"ids": ids, "images": ["61x47", "150x90"], "log_probabilities": sample(found.numpy(), found.numel())}
    return m, run


def glm_edge() -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute GLM-Edge-V's tower as the code beside its checkpoint does, with the names of projector files."""
    n, n_head, ff, patch, size, out, out_ff, f = 32, 2, 44, 14, 56, 40, 56, torch.nn.functional
    p, block = "adapter.linear.", {"ln1": (n,), "ln2": (n,), "ffn_down": (ff, n), "ffn_up": (n, ff)}
    block |= {f"attn_{name}": (n, n) for name in ("q", "k", "v", "out")}
    layers = {f"v.blk.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    layers |= {"v.patch_embd": (n, 3, patch, patch), "v.post_ln": (n,), "adapter.conv": (out, n, 2, 2),
               f"{p}norm1": (out,)}  # fmt: skip
    shapes = biased(layers) | {"v.position_embd.weight": (16, n), "adapter.boi": (out,), "adapter.eoi": (out,)}
    shapes |= {f"{p}linear.weight": (out, out), f"{p}gate.weight": (out_ff, out),
               f"{p}dense_h_to_4h.weight": (out_ff, out), f"{p}dense_4h_to_h.weight": (out, out_ff)}  # fmt: skip
    m, v, half = Weights(shapes, {"text_config": TEXT}, {}), "clip.vision.", [0.5] * 3
    m.metadata = {"general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "adapter",
                  f"{v}image_size": size, f"{v}patch_size": patch, f"{v}embedding_length": n,
                  f"{v}feed_forward_length": ff, f"{v}projection_dim": 512, f"{v}attention.head_count": n_head,
                  f"{v}block_count": 2, f"{v}attention.layer_norm_epsilon": 1e-6, f"{v}image_mean": half,
                  f"{v}image_std": half, "clip.use_gelu": True}  # fmt: skip
    processor = tf.MllamaImageProcessor(size={"height": size, "width": size}, max_image_tiles=1, image_mean=half,
                                        image_std=half)  # fmt: skip

    def run(rgb: np.ndarray) -> Found:
        pixels = processor([Image.fromarray(rgb)], return_tensors="pt")["pixel_values"][0, 0, 0]
        x = f.conv2d(pixels[None], m.w["v.patch_embd.weight"], m.w["v.patch_embd.bias"], patch)[0].flatten(1).T
        x = x + m.w["v.position_embd.weight"]
        for i in range(2):
            b = f"v.blk.{i}."
            y = m.norm(x, f"{b}ln1", 1e-6)
            parts = [m.linear(y, f"{b}attn_{k}").reshape(len(x), n_head, -1).transpose(0, 1) for k in "qkv"]
            x = x + m.linear(f.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(len(x), n), f"{b}attn_out")
            y = f.gelu(m.linear(m.norm(x, f"{b}ln2", 1e-6), f"{b}ffn_down"), approximate="tanh")
            x = x + m.linear(y, f"{b}ffn_up")
        x = m.norm(x, "v.post_ln", 1e-6).T.reshape(1, n, 4, 4)
        x = f.conv2d(x, m.w["adapter.conv.weight"], m.w["adapter.conv.bias"], 2)[0].flatten(1).T
        x = f.gelu(m.norm(m.linear(x, f"{p}linear"), f"{p}norm1", 1e-5))
        x = m.linear(f.silu(m.linear(x, f"{p}gate")) * m.linear(x, f"{p}dense_h_to_4h"), f"{p}dense_4h_to_h")
        return [pixels.numpy()], [torch.cat([m.w["adapter.boi"][None], x, m.w["adapter.eoi"][None]]).numpy()], []

    return m, run
