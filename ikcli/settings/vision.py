"""Options of images: the projector of a model, and where images may come from."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.values import parse_path_item

_vision = partial(opt, topic="vision", commands="SCLBPI")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Options of images. Token counts are per image; 0 means the model's own."""

    mmproj: Path | None = _vision(None, "-mm --mmproj", "path", form="FILE", example="--mmproj mmproj-model-f16.gguf",
        env="LLAMA_ARG_MMPROJ", bench_list=False,
        help="projector of the model: with it, the model reads images (docs/vision.md). -hf finds that of the "
        "repository")
    mmproj_url: str = _vision("", "-mmu --mmproj-url", "str", form="URL", example="--mmproj-url "
        "https://example.org/mmproj.gguf", env="LLAMA_ARG_MMPROJ_URL", bench_list=False,
        help="download the projector from this address and keep it")
    mmproj_auto: bool = _vision(True, "--mmproj-auto", "switch", negative="--no-mmproj --no-mmproj-auto",
        commands="SCL", example="--no-mmproj", env="LLAMA_ARG_MMPROJ_AUTO",
        help="use the projector that -hf finds in the repository")
    mmproj_offload: bool = _vision(True, "--mmproj-offload", "switch", negative="--no-mmproj-offload",
        example="--no-mmproj-offload", env="LLAMA_ARG_MMPROJ_OFFLOAD",
        help="compute the projector on the GPU of -mg if the model uses GPUs")
    image_min_tokens: int = _vision(0, "--image-min-tokens", "int", form="N", example="--image-min-tokens 256",
        minimum=0, env="LLAMA_ARG_IMAGE_MIN_TOKENS",
        help="fewest tokens of an image, for models with images of any size; smaller images are enlarged")
    image_max_tokens: int = _vision(0, "--image-max-tokens", "int", form="N", example="--image-max-tokens 1024",
        minimum=0, env="LLAMA_ARG_IMAGE_MAX_TOKENS",
        help="most tokens of an image, for models with images of any size; larger images are reduced")
    images: tuple[Path, ...] = _vision((), "--image", "custom", commands="CBPI", form="FILE[,FILE...]",
        example="--image photo.jpg", parse=parse_path_item, repeat=True, bench_list=False,
        help="show these images to the model, before the prompt; for a measurement, where its text has <__media__>")
    media_path: Path | None = _vision(None, "--media-path", "path", commands="S", form="DIR",
        example="--media-path images", env="LLAMA_ARG_MEDIA_PATH",
        help="requests may name images below this folder with file: URLs")
    media_remote: bool = _vision(False, "--media-remote", "switch", commands="S", example="--media-remote",
        help="requests may name images with http(s) addresses of the internet, which the server loads")
    media_private: bool = _vision(False, "--media-private", "switch", commands="S", example="--media-private",
        help="with --media-remote, addresses of private networks and of this machine are loaded too")
