"""Codecs by name. Apart from `registry`, so that the workflow can read it without torch."""

CODECS = {
    "identity": "kvlab.codec.identity:IdentityCodec",
    "noise": "kvlab.codec.noise:NoiseCodec",
    "cast": "kvlab.codec.cast:CastCodec",
    "isotropic": "kvlab.codec.isotropic:IsotropicCodec",
    "block": "kvlab.codec.block:BlockCodec",
    "klt": "kvlab.codec.klt:KltCodec",
    "int": "kvlab.codec.ladder.int_groups:IntCodec",
    "kivi": "kvlab.codec.ladder.kivi:KiviCodec",
    "hadamard": "kvlab.codec.ladder.hadamard:HadamardCodec",
    "oscar": "kvlab.codec.ladder.oscar:OscarCodec",
    "fp8": "kvlab.codec.ladder.fp8:Fp8Codec",
    "d4": "kvlab.codec.ladder.d4:D4Codec",
    "e8": "kvlab.codec.ladder.e8:E8Codec",
}

UNSTORED = ("noise", "cast", "isotropic")
"""Controls of measurements: they change a tensor and write no codes, so no file and no cache can be made of them."""
