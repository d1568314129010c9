"""Projector files that are damaged or made to do harm: one sentence each, no other exception, bounded memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from live_server import Server
from projector_models import Model
from vision_models import answers, image

from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.models import HParams
from ikcli.vision.decode import Picture, Tile
from ikcli.vision.projector import Projector

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vision"
GOLDEN_NAMES = ("gemma3", "gemma4", "mistral3", "qwen25vl", "qwen3vl") if GOLDEN.is_dir() else ()
VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 1000, 10**9, -(2**31), 2**63 - 1, "x", "", True, False, 1.5, float("nan"), float("inf"), 1e-30, [],
    [0] * 3, [-7], [float("nan")] * 3, [10**9] * 2, ["a"], list(range(2000)), [336, 672, 672, 336],
)  # fmt: skip
KEYS = ("image_size", "patch_size", "preproc_max_tiles", "preproc_min_tiles", "preproc_image_size", "image_max_pixels",
        "projector.scale_factor", "spatial_merge_size", "feature_layer", "is_deepstack_layers", "n_wa_pattern",
        "window_size", "image_grid_pinpoints", "projection_dim")  # fmt: skip
TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.I32, GGMLType.I8)
Rng = np.random.Generator


class Changed:
    """Metadata and tensors of a projector file, to be changed at random and written."""

    def __init__(self, path: str, rng: Rng) -> None:
        file = open_gguf(path)
        self.rng, self.metadata = rng, dict(file.typed_metadata())
        self.tensors = {
            name: (tuple(int(n) for n in t.shape), t.type, file.data(name).reshape(-1).view(np.uint8))
            for name, t in file.tensors.items()
        }

    def pick(self, of: Any) -> Any:
        found = list(of)
        return found[int(self.rng.integers(len(found)))]

    def write(self, path: Path) -> None:
        specs = [NewTensor(name, shape, type_) for name, (shape, type_, _) in self.tensors.items()]
        with GGUFWriter(path, self.metadata, specs) as writer:
            for name, (_, _, data) in self.tensors.items():
                writer.write_tensor(name, data)
        if self.rng.random() < 0.15:
            data = bytearray(path.read_bytes())
            for _ in range(5):
                data[int(self.rng.integers(min(len(data), 6000)))] = int(self.rng.integers(256))
            path.write_bytes(data[: int(self.rng.integers(len(data)))] if self.rng.random() < 0.5 else data)

    # --- changes ------------------------------------------------------------------------------------------------------
    def key(self) -> None:
        known = [key for key in self.metadata if key.startswith("clip")]
        self.metadata[self.pick([*known, *(f"clip.vision.{key}" for key in KEYS)])] = self.pick(VALUES)

    def no_key(self) -> None:
        self.metadata.pop(self.pick(key for key in self.metadata if key.startswith("clip")))

    def no_tensor(self) -> None:
        self.tensors.pop(self.pick(self.tensors))

    def swapped(self) -> None:
        a, b = self.pick(self.tensors), self.pick(self.tensors)
        self.tensors[a], self.tensors[b] = self.tensors[b], self.tensors[a]

    def shape(self) -> None:
        name = self.pick(self.tensors)
        shape, type_, data = self.tensors[name]
        n, other = int(np.prod(shape)), int(self.rng.integers(1, 20))
        new: tuple[int, ...] = self.pick([shape[::-1], (n,), (1, 1, n), (*shape[:-1], other)])
        if type_ in (GGMLType.F32, GGMLType.F16):
            self.tensors[name] = new, type_, np.resize(data, int(np.prod(new)) * (len(data) // n))

    def type(self) -> None:
        name, type_ = self.pick(self.tensors), self.pick(TYPES)
        shape = self.tensors[name][0]
        if (type_ != GGMLType.Q8_0 or shape[0] % 32 == 0) and (type_ != GGMLType.Q4_K or shape[0] % 256 == 0):
            data = self.rng.integers(0, 256, NewTensor(name, shape, type_).n_bytes, np.uint8)
            self.tensors[name] = shape, type_, data

    def values(self) -> None:
        name = self.pick(self.tensors)
        shape, type_, data = self.tensors[name]
        if type_ in (GGMLType.F32, GGMLType.F16):
            kind: npt.DTypeLike = np.float32 if type_ is GGMLType.F32 else np.float16
            found = data.copy().view(kind)
            found[:: int(self.rng.integers(1, 50))] = self.pick((np.nan, np.inf, -np.inf, 0, 65000))
            self.tensors[name] = shape, type_, found.view(np.uint8)

    def name(self) -> None:
        name = self.pick(self.tensors)
        self.tensors[self.pick((f"{name}x", name.replace("0", "7")))] = self.tensors.pop(name)


CHANGES: tuple[Callable[[Changed], None], ...] = (
    Changed.key, Changed.key, Changed.no_key, Changed.no_tensor, Changed.swapped, Changed.shape, Changed.type,
    Changed.values, Changed.name,
)  # fmt: skip


def text_of(name: str) -> HParams:
    file = open_gguf(GOLDEN / f"{name}.gguf")
    return HParams.from_gguf(file.metadata, file.tensors, f"{name}.gguf")


@pytest.fixture(scope="module", params=[*sorted(answers()), *GOLDEN_NAMES])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, HParams]:
    """The path of an intact projector, and its text model."""
    if request.param in GOLDEN_NAMES:
        return str(GOLDEN / f"{request.param}.mmproj.gguf"), text_of(request.param)
    model = Model(request.param, tmp_path_factory.mktemp(request.param))
    return model.projector.path, model.hp


def hostile(whole: tuple[str, HParams], path: Path, n: int, use: Callable[[Projector, Picture], None]) -> int:
    """Open and use n changed files; return how many were refused."""
    rng, picture, refused = np.random.default_rng(n), Picture.of(image(150, 90)), 0
    for _ in range(n):
        changed = Changed(whole[0], rng)
        for _ in range(int(rng.integers(1, 4))):
            changed.pick(CHANGES)(changed)
        changed.write(path)
        try:
            projector = Projector.open(path, whole[1])
            try:
                use(projector, picture)
            finally:
                projector.close()
        except IkError as e:
            refused += 1
            assert str(path) in str(e) and "\n" not in str(e) and len(str(e)) < 500
    return refused


def counted(projector: Projector, picture: Picture) -> None:
    projector.memory()
    for one in projector.pieces(picture):
        assert isinstance(one, str) or projector.count(one) > 0


def encoded(projector: Projector, picture: Picture) -> None:
    tiles = [one for one in projector.pieces(picture) if isinstance(one, Tile)]
    for tile in tiles[:2]:
        rows = projector.encode(tile).rows
        assert len(rows) == projector.count(tile) and np.isfinite(rows).all()


def test_changed_files_open_or_say_why(whole: tuple[str, HParams], tmp_path: Path) -> None:
    assert hostile(whole, tmp_path / "changed.gguf", 12, counted) > 2


@pytest.mark.slow("compiles the kernels of towers; over a thousand files")
def test_changed_files_encode_or_say_why(whole: tuple[str, HParams], tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert hostile(whole, tmp_path / "changed.gguf", 60, encoded) > 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.fixture
def ldp(tmp_path: Path) -> tuple[Changed, Model]:
    model = Model("ldp", tmp_path)
    return Changed(model.projector.path, np.random.default_rng(0)), model


def refusal(changed: Changed, model: Model, path: Path) -> str:
    changed.write(path)
    with pytest.raises(IkError) as found:
        projector = Projector.open(path, model.hp)
        projector.encode(Picture.of(image(20, 20)))
    return str(found.value)


def test_layers_have_the_same_tensors(ldp: tuple[Changed, Model], tmp_path: Path) -> None:
    del ldp[0].tensors["v.blk.1.attn_q.bias"]
    assert "'v.blk.1.attn_q.bias' is missing, which other layers have" in refusal(*ldp, tmp_path / "changed.gguf")


def test_norms_of_layers_are_needed(ldp: tuple[Changed, Model], tmp_path: Path) -> None:
    for name in [name for name in ldp[0].tensors if ".ln1." in name]:
        del ldp[0].tensors[name]
    assert "'v.blk.0.ln1.weight' is missing" in refusal(*ldp, tmp_path / "changed.gguf")


def test_integers_are_no_weights(ldp: tuple[Changed, Model], tmp_path: Path) -> None:
    name = "v.blk.0.ffn_up.weight"
    shape = ldp[0].tensors[name][0]
    ldp[0].tensors[name] = shape, GGMLType.I32, np.zeros(4 * int(np.prod(shape)), np.uint8)
    assert f"tensor '{name}' is i32" in refusal(*ldp, tmp_path / "changed.gguf")


@pytest.mark.skipif(not GOLDEN_NAMES, reason="the models with images are not here")
def test_images_have_a_largest_size(tmp_path: Path) -> None:
    changed = Changed(str(GOLDEN / "mistral3.mmproj.gguf"), np.random.default_rng(0))
    changed.metadata["clip.vision.image_size"] = 16384
    changed.write(path := tmp_path / "changed.gguf")
    with pytest.raises(IkError, match=r"patches; at most 131072 .*--image-max-tokens"):
        Projector.open(path, text_of("mistral3"))
    Projector.open(path, text_of("mistral3"), max_tokens=1000).close()


@pytest.mark.slow("compiles the kernels of a tower")
def test_tensors_that_are_not_finite_are_named(ldp: tuple[Changed, Model], tmp_path: Path) -> None:
    name = "v.blk.0.ln1.bias"
    shape, type_, data = ldp[0].tensors[name]
    ldp[0].tensors[name] = shape, type_, np.full(len(data) // 4, np.nan, np.float32).view(np.uint8)
    assert f"NaN or Inf: tensor '{name}' holds such values" in refusal(*ldp, tmp_path / "changed.gguf")


@pytest.mark.slow("a server as a process")
@pytest.mark.skipif(not GOLDEN_NAMES, reason="the models with images are not here")
def test_a_server_survives_a_projector_that_is_not_finite(tmp_path: Path) -> None:
    changed = Changed(str(GOLDEN / "gemma3.mmproj.gguf"), np.random.default_rng(0))
    shape, type_, data = changed.tensors["v.blk.0.ln1.bias"]
    changed.tensors["v.blk.0.ln1.bias"] = shape, type_, np.full(len(data) // 4, np.nan, np.float32).view(np.uint8)
    changed.write(path := tmp_path / "changed.gguf")
    server = Server("-m", str(GOLDEN / "gemma3.gguf"), "--mmproj", str(path), "--media-path", str(GOLDEN / "images"),
                    log=tmp_path / "log")  # fmt: skip
    try:
        server.wait_ready()
        part = {"type": "image_url", "image_url": {"url": "file://small.png"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 500
        assert "'v.blk.0.ln1.bias' holds such values" in json.loads(response.text)["error"]["message"]
        text = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", text).status_code == 200
        assert "Traceback" not in server.text()
    finally:
        assert server.stop() == 0
