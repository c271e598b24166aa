"""transformers' `QuantizedCache`: one width for K and V of all layers; a prompt's own tokens read exact K and V."""

from kvlab.advice.own import own_formats
from kvlab.advice.serving import DEVICES, CacheFormat, ServingEngine


def _cache(backend: str, bits: int, package: str) -> CacheFormat:
    name = f"{backend}-int{bits}"
    option = f'"backend": "{backend}", "nbits": {bits}'
    return CacheFormat(name, option=option, devices=DEVICES, needs=package)


ENGINE = ServingEngine(
    name="transformers",
    version="5.19",
    formats=(
        *(_cache("quanto", bits, "the package optimum-quanto") for bits in (4, 2)),
        *(_cache("hqq", bits, "the package hqq") for bits in (8, 4, 2)),
        *own_formats(
            "Cache",
            '  # then model.generate(**inputs, past_key_values=kvlab.Cache(model, "{file}"))',
            devices=DEVICES,
            needs="the package kvlab (docs/transformers.md)",
            unmeasured="what answers lose on their own newest tokens; kvlab.Cache on a GPU",
        ),
    ),
    line='model.generate(**inputs, cache_implementation="quantized", cache_config={{{option}}})  # {model}',
    as_read="snapshot",
    held="what QuantizedCache reads back of a prompt, with optimum-quanto 0.2.7 and HQQ 0.2.8 (docs/codecs.md)",
    unmeasured="answers of more than 127 tokens, after which all tokens are coded anew",
    sources=("transformers 5.19: cache_utils.py", "https://huggingface.co/docs/transformers/kv_cache"),
    plain="",
)
