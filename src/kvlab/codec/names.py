"""Codecs by name. Apart from `registry`, so that the workflow can read it without torch."""

CODECS = {
    "identity": "kvlab.codec.identity:IdentityCodec",
    "noise": "kvlab.codec.noise:NoiseCodec",
    "block": "kvlab.codec.block:BlockCodec",
}
