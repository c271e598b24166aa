"""Codecs by name. Apart from `registry`, so that the workflow can read it without torch."""

CODECS = {
    "identity": "kvlab.codec.controls.identity:IdentityCodec",
    "noise": "kvlab.codec.controls.noise:NoiseCodec",
    "cast": "kvlab.codec.controls.cast:CastCodec",
    "isotropic": "kvlab.codec.controls.isotropic:IsotropicCodec",
    "block": "kvlab.codec.block.codec:BlockCodec",
    "klt": "kvlab.codec.klt.codec:KltCodec",
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
