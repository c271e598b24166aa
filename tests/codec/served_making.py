"""What engines themselves make of a few heads of K and V, kept as JSON: what `test_served.py` holds codecs against.

    pip download --no-deps xllamacpp==2026.10.11549 && unzip xllamacpp-*.whl -d DIR        # llama.cpp, compiled
    python tests/codec/served_making.py llama.cpp DIR/xllamacpp/xllamacpp.abi3.so
    TRITON_INTERPRET=1 python tests/codec/served_making.py vllm                             # its own kernels
    pip install --no-deps --target DIR optimum-quanto==0.2.7 hqq==0.2.8.post1 termcolor
    PYTHONPATH=DIR python tests/codec/served_making.py transformers                          # its own QuantizedCache
    python tests/codec/served_making.py inputs MODEL                                         # a folder with SmolLM2

Each writes its part of ``served.json`` and leaves the others. Inputs are [tokens, 64] in bfloat16: drawn ones, and K
after its rotary embedding and V of a model.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("served.json")
TOKENS, HEAD_DIM, PAGE = 8, 64, 16
TEXT = "A cache holds the keys and the values of all tokens so far."


def kept(array: Tensor) -> str:
    """The bytes of an array as text."""
    return base64.b64encode(array.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()


def read(text: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The array again, flat."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(dtype)


def inputs(model: str) -> dict[str, Tensor]:
    """Heads by name, bfloat16 [tokens, 64]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = torch.Generator().manual_seed(0)
    white = torch.randn(TOKENS, HEAD_DIM, generator=source)
    heavy = torch.randn(TOKENS, HEAD_DIM, generator=source) * torch.randn(TOKENS, HEAD_DIM, generator=source).exp() ** 2
    loud = torch.randn(TOKENS, HEAD_DIM, generator=source)
    loud[:, 5] += 90
    odd = torch.randn(TOKENS, HEAD_DIM, generator=source)
    odd[0], odd[1], odd[2, :32], odd[3], odd[4], odd[5] = 0, 1.5, 0, odd[3] * 1e-4, (odd[4] * 2).round() / 2, -odd[4]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt")
    with torch.no_grad():
        layer = loaded(**ids, use_cache=True).past_key_values.layers[5]
    real = {"K of SmolLM2": layer.keys[0, 0, :TOKENS], "V of SmolLM2": layer.values[0, 0, :TOKENS]}
    drawn = {"normal": white, "heavy tails": heavy, "a loud channel": loud, "odd ones": odd}
    return {name: rows.bfloat16() for name, rows in (drawn | real).items()}


def llama_cpp(rows: dict[str, Tensor], library: str) -> dict[str, dict[str, str]]:
    """Blocks of each type, by ggml's reference quantisation."""
    ggml = ctypes.CDLL(library)
    ggml.ggml_cpu_init()
    found: dict[str, dict[str, str]] = {}
    for kind, size in {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}.items():
        quantise = getattr(ggml, f"quantize_row_{kind}_ref")
        quantise.argtypes, quantise.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        for name, x in rows.items():
            x, out = x.float().contiguous().numpy(), np.zeros(x.numel() // 32 * size, dtype=np.uint8)
            quantise(x.ctypes.data, out.ctypes.data, x.size)
            found.setdefault(kind, {})[name] = kept(torch.from_numpy(out))
    return found


def vllm(rows: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """What its store kernels write, K and V the same rows, one head; a head's 8-bit floats by its kernel for CPUs."""
    import triton
    import triton.language as tl
    import vllm.triton_utils

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl  # it does without where there is no driver
    from vllm import _custom_ops as compiled
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant
    from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as flash
    from vllm.v1.attention.ops import triton_turboquant_store as turboquant
    from vllm.v1.attention.ops.ultraquant.reference import ultraquant_encode
    from vllm.v1.kv_cache_interface import KVQuantMode

    slots = torch.arange(TOKENS)
    per_token = {
        "int8_per_token_head": (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8, HEAD_DIM),
        "fp8_per_token_head": (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.float8_e4m3fn, HEAD_DIM),
        "int4_per_token_head": (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8, HEAD_DIM // 2),
    }
    found: dict[str, dict[str, str]] = {}
    for name, x in rows.items():
        x = x[:, None]
        for kind, (mode, dtype, width) in per_token.items():
            k, v = torch.zeros(2, 1, TOKENS, 1, width, dtype=dtype)
            k_scale, v_scale = torch.zeros(2, 1, TOKENS, 1)
            flash.triton_reshape_and_cache_flash_per_token_head_quant(x, x, k, v, k_scale, v_scale, slots, mode)
            found.setdefault(kind, {})[name] = kept(k) + " " + kept(k_scale)
        for kind in ("fp8_e4m3", "fp8_e5m2"):
            cache = torch.zeros(1, 1, 2 * PAGE, HEAD_DIM, dtype=torch.uint8)
            k, v = cache.chunk(2, dim=2)  # K's codes lie in another order
            compiled.cpu_attn_reshape_and_cache(x, x, k, v, slots, "vec", 1.0, 1.0, kind)
            found.setdefault(kind, {})[name] = kept(v[0, 0, :TOKENS])
        for bits in (3, 4):
            table = get_centroids(HEAD_DIM, bits)
            of_k, of_v = HEAD_DIM * bits // 8 + 2, HEAD_DIM * bits // 8 + 4
            cache = torch.zeros(1, TOKENS, 1, of_k + of_v, dtype=torch.uint8)
            middles = (table[1:] + table[:-1]) / 2
            turn = _build_hadamard(HEAD_DIM, "cpu")
            turboquant.triton_turboquant_store(x, x, cache, slots, turn, middles, bits, of_k, bits)
            found.setdefault(f"lloyd_max_{bits}", {})[name] = kept(cache[..., :of_k])
            found.setdefault(f"even_{bits}", {})[name] = kept(cache[..., of_k:])
        for kind, turned in (("ultraquant_k", True), ("ultraquant_v", False)):
            made = ultraquant_encode(x[:, 0], rotate=turned)
            found.setdefault(kind, {})[name] = kept(made.codes_packed) + " " + kept(made.scale_bytes)
        values, scale = ref_nvfp4_quant(x[:, 0].float(), torch.tensor(1.0), 16)
        read_back = values.unflatten(-1, (-1, 16)) * scale[..., None]
        found.setdefault("nvfp4", {})[name] = kept(read_back.bfloat16())  # which has them all
    return found


def transformers(rows: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """What its `QuantizedCache` reads back after a prompt, in bfloat16."""
    from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

    found: dict[str, dict[str, str]] = {}
    for backend, made in {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}.items():
        for bits in (4, 2) if backend == "quanto" else (8, 4, 2):
            for name, x in rows.items():
                layer, x = made(nbits=bits), x[None, None]
                layer.update(x, x)
                found.setdefault(f"{backend} {bits}", {})[name] = kept(layer._dequantize(layer._quantized_keys))
    return found


def main(what: str, *given: str) -> None:
    """Write one part of the file."""
    content = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if what == "inputs":
        content["inputs"] = {name: kept(x) for name, x in inputs(*given).items()}
    else:
        rows = {name: read(x, torch.bfloat16).view(-1, HEAD_DIM) for name, x in content["inputs"].items()}
        content[what] = {"llama.cpp": llama_cpp, "vllm": vllm, "transformers": transformers}[what](rows, *given)
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
