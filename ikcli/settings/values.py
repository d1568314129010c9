"""Convert option texts to structured values.

Each function returns the value or raises ValueError with half a sentence about the problem; the parser adds flag and
example.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ikcli.errors import UsageError
from ikcli.settings.records import DeviceSpec, ScaledFile, SpecSetting, SpecStage
from ikcli.text_files import read_text

OFFLOAD_OPS = {26: "MUL_MAT", 27: "MUL_MAT_ID", 28: "OUT_PROD", 29: "MOE_FUSED_UP_GATE", -1: "ALL"}
"""Operation numbers that users wrote into `-op` in 2025, and the names they meant then."""

MAX_DEVICES = 64
MAX_CPUS = 4096
NUMA_MODES = ("distribute", "isolate", "mirror", "numactl")
OVERRIDE_TYPES = ("int", "float", "bool", "str")
ON = frozenset({"on", "1", "true", "yes", "enabled"})
OFF = frozenset({"off", "0", "false", "no", "disabled"})


def parse_threads(text: str) -> int:
    """Parse a thread count of at least 1; `auto` (or -1) gives 0, which stands for the number of physical cores."""
    if text.lower() in ("auto", "-1"):
        return 0
    try:
        count = int(text)
    except ValueError:
        raise ValueError("is neither a number nor auto") from None
    if count < 1:
        raise ValueError("must be at least 1")
    return count


def parse_parallel(text: str) -> int:
    """Parse a number of slots; -1 (the program decides) gives 1 slot with the whole context."""
    count = 1 if text == "-1" else _whole(text)
    if count < 1:
        raise ValueError("is less than 1")
    return count


def parse_layers(text: str) -> int | None:
    """Parse a number of blocks; `all` gives -1, `auto` None."""
    word = text.lower()
    if word in ("auto", "all"):
        return None if word == "auto" else -1
    count = _whole(text)
    if count < -1:
        raise ValueError("is less than -1")
    return count


def parse_margin(text: str) -> int:
    """Parse MiB: one value for all GPUs, or one per GPU, of which the largest counts."""
    margin = max(_whole(piece) for piece in text.split(","))
    if margin < 0:
        raise ValueError("is less than 0")
    return margin


def parse_devices(text: str) -> tuple[str, ...]:
    """Parse device names separated by commas or slashes; `none` alone means no GPU."""
    names = tuple(name.strip() for name in re.split("[,/]", text) if name.strip())
    return names


def parse_cpu_mask(text: str) -> tuple[int, ...]:
    """Return the CPUs of a hexadecimal mask; 0 gives none."""
    try:
        mask = int(text, 16)
    except ValueError:
        raise ValueError("is not a hexadecimal number") from None
    if not 0 <= mask < 1 << MAX_CPUS:
        raise ValueError(f"is not a mask of at most {MAX_CPUS} CPUs")
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as `0-3,8`."""
    cpus: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        low, high = _whole(first), _whole(last if dash else first)
        if not low <= high < MAX_CPUS:
            raise ValueError(f"is not a range of CPUs from 0 to {MAX_CPUS - 1}")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None


def parse_numa(text: str) -> str:
    """Parse one of NUMA_MODES; an empty value means distribute."""
    mode = text.strip().lower() or "distribute"
    if mode not in NUMA_MODES:
        raise ValueError(f"is not one of {', '.join(NUMA_MODES)}")
    return mode


def parse_ser(text: str) -> tuple[int, float] | None:
    """Parse `Kmin,t` as (Kmin, t); a Kmin of 0 or less switches it off (None)."""
    parts = text.split(",")
    try:
        if len(parts) != 2:
            raise ValueError
        k_min, threshold = float(parts[0]), float(parts[1])
    except ValueError:
        raise ValueError("is not exactly one pair of numbers") from None
    if not (math.isfinite(k_min) and math.isfinite(threshold)):
        raise ValueError("is not a pair of finite numbers")
    if k_min <= 0:
        return None
    if threshold > 1 or (k_min < 2 and threshold >= 1) or k_min != int(k_min):
        raise ValueError(f"is the wrong way round: the order is Kmin,t; did you mean -ser {parts[1]},{parts[0]}?")
    if threshold < 0:
        raise ValueError("has a negative threshold; t is between 0 and 1")
    return int(k_min), threshold


def parse_split(text: str) -> tuple[float, ...]:
    """Parse device shares separated by `,` or `/` (or `;`), e.g. `3,1`."""
    pieces = text.replace("/", ",").replace(";", ",").split(",")
    try:
        shares = tuple(float(piece) for piece in pieces if piece.strip())
    except ValueError:
        raise ValueError("contains something that is not a number") from None
    if not shares or not all(math.isfinite(share) and share >= 0 for share in shares):
        raise ValueError("needs at least one share, all finite and not negative")
    if sum(shares) <= 0:
        raise ValueError("gives no device any share")
    return shares


def parse_rules(text: str) -> tuple[str, ...]:
    """Parse `RE=BUF[,RE=BUF...]` into one string per rule; blanks and newlines around rules are dropped."""
    rules = tuple(piece.strip() for piece in text.split(",") if piece.strip())
    if not rules:
        raise ValueError("contains no rule")
    for rule in rules:
        pattern, equals, buffer = rule.partition("=")
        if not equals:
            raise ValueError(f"has a rule without '=': \"{rule}\" (a comma ends a rule, write (3|4) for alternatives)")
        if not pattern.strip() or not buffer.strip():
            raise ValueError(f'has an incomplete rule: "{rule}"')
    return rules


_NEXT_KEY = re.compile(r",(?=[^=,\s]+=(?:int|float|bool|str):)")


def parse_override_kv(text: str) -> tuple[str, ...]:
    """Check that `KEY=TYPE:VALUE[,KEY=TYPE:VALUE...]` has known types and values that fit them."""
    pieces = _NEXT_KEY.split(text)
    for piece in pieces:
        _check_override(piece)
    return tuple(pieces)


def _check_override(text: str) -> None:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon):
        raise ValueError("is not of the form KEY=TYPE:VALUE")
    if kind not in OVERRIDE_TYPES:
        raise ValueError(f"has the type {kind}, which is not one of {', '.join(OVERRIDE_TYPES)}")
    try:
        if kind == "int":
            int(value)
        elif kind == "float":
            float(value)
    except ValueError:
        raise ValueError(f"has the value {value}, which is not of type {kind}") from None
    if kind == "bool" and value.lower() not in ("true", "false"):
        raise ValueError(f"has the value {value}; a bool is true or false")


def parse_offload_policy(text: str) -> tuple[tuple[str, bool], ...]:
    """Parse `a,b[,a,b...]` with a = operation name or 2025 number, b = 0 or 1; `NAME=off` works too."""
    pairs: list[tuple[str, bool]] = []
    pieces = [piece.strip() for piece in text.split(",")]
    index = 0
    while index < len(pieces):
        name, equals, state = pieces[index].partition("=")
        if not equals:
            if index + 1 >= len(pieces):
                raise ValueError(f"ends with {name} and no 0 or 1 after it")
            state = pieces[index + 1]
            index += 1
        index += 1
        pairs.append((_op_name(name.strip()), _on_off(state.strip())))
    return tuple(pairs)


def _op_name(text: str) -> str:
    known = ", ".join(f"{name} ({number})" for number, name in OFFLOAD_OPS.items())
    try:
        number = int(text)
    except ValueError:
        if text.upper() in OFFLOAD_OPS.values():
            return text.upper()
    else:
        if number in OFFLOAD_OPS:
            return OFFLOAD_OPS[number]
    raise ValueError(f"names the operation {text}, which is not one of {known}")


def _on_off(text: str) -> bool:
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    raise ValueError(f"has the state {text}; it is 0 or 1, on or off")


_SIZE = re.compile(r"(\d{1,18}(?:\.\d*)?|\.\d+)\s*(?:([KMGT]?)(i?B)|([KMGT]))", re.IGNORECASE)
_PREFIXES = ("", "K", "M", "G", "T")
_DEVICE = re.compile(r"(?:(\d+)\*)?(cuda|cpu):([\d.]+)([a-z]*)((?::[a-z]+=[\d.]+)*)", re.IGNORECASE)
_CC = re.compile(r"(\d+)\.(\d)")


def parse_size(text: str) -> int:
    """Return the number of bytes, at least 1, of `12GiB`, `900M` or `1.5GB`.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000; B is bytes. Case does not
    matter. A number without a unit is an error.
    """
    found = _SIZE.fullmatch(text.strip())
    number, prefix, suffix, alone = found.groups() if found else ("0", "", "", None)
    base = 1000 if prefix and suffix.upper() == "B" else 1024
    n_bytes = round(float(number) * base ** _PREFIXES.index((alone or prefix).upper()))
    if n_bytes < 1:
        number = text.strip()
        way = "a number above 0 with a unit, 12GiB"
        if number.isdecimal():
            way = f"it with a unit, {number}GiB or {number}GB"
        raise ValueError(f'has the size "{text}"; write {way}')
    return n_bytes


def parse_gib(text: str) -> int:
    """Return the bytes of a size in GiB, or of one with a unit (see `parse_size`); 0 stays 0."""
    try:
        n_bytes = float(text) * 2**30
    except ValueError:
        return parse_size(text)
    if not 0 <= n_bytes < 2**60:
        raise ValueError("is not a size in GiB")
    return int(n_bytes)


def parse_device_spec(text: str) -> tuple[DeviceSpec, ...]:
    """Parse `[N*]cuda:SIZE` and `cpu:SIZE` entries separated by commas, each perhaps with facts `:NAME=NUMBER`.

    Sizes are as for `parse_size`. Facts: `cc` (compute capability of a GPU), `tops` (products, 1e12 operations per
    second), `bus` (host to GPU) and `read` (RAM to the CPU), both in GB/s.
    """
    specs: list[DeviceSpec] = []
    for piece in filter(None, (item.strip() for item in text.split(","))):
        found = _DEVICE.fullmatch(piece)
        if found is None:
            raise ValueError(f'has the device "{piece}", which is not of the form cuda:24GiB or cpu:256GiB')
        count, kind, size, unit, facts = found.groups()
        n_bytes = parse_size(size + unit)
        if n_bytes <= 0 or int(count or 1) < 1 or n_bytes >= 2**60:
            raise ValueError(f'has the device "{piece}"; count and size must be above 0')
        spec = DeviceSpec(kind.lower(), n_bytes, **_device_facts(piece, kind.lower(), facts.lower()))
        specs += [spec] * min(int(count or 1), MAX_DEVICES + 1)
    if not specs:
        raise ValueError("names no device")
    if sum(spec.kind == "cuda" for spec in specs) > MAX_DEVICES:
        raise ValueError(f"has more than {MAX_DEVICES} GPUs")
    if sum(spec.kind == "cpu" for spec in specs) > 1:
        raise ValueError("describes the host memory (cpu:SIZE) more than once")
    return tuple(specs)


def _device_facts(piece: str, kind: str, text: str) -> dict[str, Any]:
    """Return the fields of a `DeviceSpec` that `:NAME=NUMBER` texts give; rates per second."""
    found: dict[str, Any] = {}
    for fact in filter(None, text.split(":")):
        name, _, number = fact.partition("=")
        if name == "cc" and kind == "cpu":
            raise ValueError("gives cc to cpu; only GPUs have a compute capability")
        if name not in ("cc", "tops", {"cuda": "bus", "cpu": "read"}[kind]):
            known = "cc, tops and bus" if kind == "cuda" else "tops and read"
            raise ValueError(f'has the device "{piece}"; facts of {kind} are {known}, not {name}')
        if name == "cc":
            version = _CC.fullmatch(number)
            if version is None:
                raise ValueError(f'has the device "{piece}", which is not of the form cuda:24GiB:cc=8.9')
            found["capability"] = (int(version[1]), int(version[2]))
            continue
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e6:
            raise ValueError(f'has the device "{piece}"; {name} must be a number above 0')
        if name == "tops":
            found["ops"] = rate * 1e12
        else:
            found["bandwidth"] = rate * 1e9
    return found


def parse_pair(text: str) -> tuple[int, int]:
    """Parse two whole numbers `P,N`."""
    try:
        first, second = (int(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError("is not a pair of whole numbers") from None
    return first, second


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Parse one `P,N` of a repeatable option."""
    return (parse_pair(text),)


def parse_thread_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `g,b[;g,b]`: pairs of generation and batch threads."""
    return tuple(parse_pair(piece) for piece in text.split(";") if piece.strip())


_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
_MOST_IN_RANGE = 10_000


def parse_int_list(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas.

    `1-4`, `0-8192+2048` and `512-8192*2` are ranges that include both ends.
    """
    numbers: list[int] = []
    for piece in text.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if found is None:
            try:
                numbers.append(int(piece))
            except ValueError:
                raise ValueError("is not a list of whole numbers") from None
        else:
            numbers += _range(int(found[1]), int(found[2]), found[3] or "+", int(found[4] or 1))
    return tuple(numbers)


def _range(first: int, last: int, operator: str, step: int) -> list[int]:
    if step < 1 or (operator == "*" and (step < 2 or first < 1)):
        raise ValueError("is a range that never ends")
    numbers: list[int] = []
    while first <= last and len(numbers) < _MOST_IN_RANGE:
        numbers.append(first)
        first = first + step if operator == "+" else first * step
    return numbers


def parse_text_item(text: str) -> tuple[str, ...]:
    """Return one text value of a repeatable option."""
    return (text,)


def parse_path_item(text: str) -> tuple[Path, ...]:
    """Parse comma-separated files of a repeatable option; an existing file whose name contains a comma is one file."""
    whole = Path(text).expanduser()
    names = [text] if "," not in text or whole.exists() else text.split(",")
    if not all(names):
        raise ValueError("is empty" if not text else "has an empty name")
    return tuple(Path(name).expanduser() for name in names)


_NEXT_FILE = re.compile(r"(?<=:)([^:,]+),")


def parse_scaled_file(text: str) -> tuple[ScaledFile, ...]:
    """Parse `FILE SCALE`, or `FILE:SCALE[,FILE:SCALE...]`, of a repeatable option."""
    pieces = _NEXT_FILE.sub("\\1\n", text).split("\n")
    return tuple(_scaled_file(piece) for piece in pieces)


def _scaled_file(text: str) -> ScaledFile:
    for separator in (" ", ":"):
        path, _, number = text.rpartition(separator)
        try:
            scale = float(number)
        except ValueError:
            continue
        if path and math.isfinite(scale):
            return ScaledFile(Path(path).expanduser(), scale)
    raise ValueError("is not a file and a scale")


def parse_layer_range(text: str) -> tuple[int, int]:
    """Parse `FIRST LAST`, two layer numbers."""
    try:
        first, last = (int(piece) for piece in text.replace(",", " ").split())
    except ValueError:
        raise ValueError("is not two whole numbers") from None
    if not 0 <= first <= last:
        raise ValueError("is not a range: the first layer comes first, and none is below 0")
    return first, last


SPEC_TYPES = (
    "none", "draft", "mtp", "eagle3", "dflash", "dspark", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod",
    "ngram-cache", "suffix",
)  # fmt: skip


_SPEC_NAMES = {
    "draft-simple": "draft",
    "draft-mtp": "mtp",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "draft-dspark": "dspark",
}


_SPEC_KEYS = {
    "n_max": "n_max",
    "n_min": "n_min",
    "p_min": "p_min",
    "ngram_size_n": "size_n",
    "ngram_size_m": "size_m",
    "ngram_min_hits": "min_hits",
    "suffix_min_match_len": "size_n",
    "suffix_max_depth": "size_m",
}


def parse_spec_type(text: str) -> tuple[SpecStage, ...]:
    """Parse `TYPE[:key=value,...]`; commas may join several types if no keys follow."""
    _, _, keys = text.partition(":")
    types = [_SPEC_NAMES.get(t, t) for t in _spec_types(text)]
    unknown = [t for t in types if t not in SPEC_TYPES]
    if unknown:
        raise ValueError(f"names {unknown[0] or 'no type'}; use one of {', '.join(SPEC_TYPES)}")
    values: dict[str, float] = {}
    for item in filter(None, keys.split(",")):
        field, number = _spec_key(item)
        values[field] = number
    return tuple(SpecStage(t, **values) for t in types)  # type: ignore[arg-type]


def _spec_types(text: str) -> list[str]:
    return [t.strip().lower().replace("_", "-") for t in text.partition(":")[0].split(",")]


def parse_spec_setting(text: str) -> tuple[SpecSetting, ...]:
    """Parse `TYPE:key=value[,key=value...]`."""
    name, colon, keys = text.partition(":")
    type = name.strip().lower()
    if type not in (*SPEC_TYPES, "ngram") or not colon or not keys:
        raise ValueError(f"is not of the form TYPE:KEY=VALUE with one of {', '.join(SPEC_TYPES)}, or ngram")
    return tuple(SpecSetting(type, *_spec_key(item)) for item in keys.split(","))


def _spec_key(item: str) -> tuple[str, float]:
    """Return the field of a SpecStage and its value, from `key=value`."""
    key, _, value = (piece.strip() for piece in item.partition("="))
    if key not in _SPEC_KEYS:
        raise ValueError(f"has the key {key}; use {', '.join(_SPEC_KEYS)}")
    try:
        number = float(value) if key == "p_min" else int(value)
    except ValueError:
        raise ValueError(f"has {key}={value}, which is not a number") from None
    if number < 0 or not math.isfinite(number):
        raise ValueError(f"has {key}={value}; it cannot be negative")
    return _SPEC_KEYS[key], number


def toml_table(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise a UsageError that names the file if it cannot be parsed."""
    import tomllib

    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise UsageError(f"{path} is not valid TOML: {problem}") from problem
