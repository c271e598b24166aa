"""llama.cpp: K and V have types of their own, all layers the same."""

from kvlab.advice.serving import DEVICES, EXACT, CacheFormat, ServingEngine

ALIKE = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
APART = (("q8_0", "q5_1"), ("q8_0", "q4_0"), ("q5_1", "q4_0"))
BUILD = "on CUDA a build with GGML_CUDA_FA_ALL_QUANTS=ON, else attention is computed on the CPU"


def _pair(k: str, v: str) -> CacheFormat:
    """K and V by these types, as ``K/V`` where they differ."""
    rotated = [one if one == EXACT else f"{one}-rotated" for one in (k, v)]
    types = ["f16" if one == EXACT else one for one in (k, v)]
    name = types[0] if k == v else "/".join(types)
    needs = "" if (k, v) in (("q8_0", "q8_0"), ("q4_0", "q4_0")) else BUILD
    devices = ("cpu",) if k == "iq4_nl" else DEVICES  # no attention on a GPU reads it
    return CacheFormat(name, *rotated, f"-ctk {types[0]} -ctv {types[1]}", devices, needs, 32)


ENGINE = ServingEngine(
    name="llama.cpp",
    version="of October 2026",
    formats=(*(_pair(one, one) for one in ALIKE), *(_pair(k, v) for k, v in APART), _pair(EXACT, "q4_0")),
    line="llama-server -m {model}.gguf -fa on {option}{skipped}",
    as_read="in_forward",
    held="all bytes of ggml's reference quantisation, compiled; its rotation of April 2026 by rule (docs/codecs.md)",
    unmeasured="attention also rounds queries to 8 bits where K is quantised; weights of fewer bits add their own loss",
    sources=(
        "https://github.com/ggml-org/llama.cpp/pull/21038 (rotation)",
        "https://github.com/ggml-org/llama.cpp/issues/24485 (GGML_CUDA_FA_ALL_QUANTS)",
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (-ctk, -ctv)",
    ),
    plain="-ctk f16 -ctv f16",
)
