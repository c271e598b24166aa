"""Codecs by name. Apart from `registry`, so that the workflow can read it without torch."""

from kvlab.base.recipe import STREAMS

CODECS = {name: stream.built_by for name, stream in STREAMS.items()}
"""Module and class of every codec of kvlab's: ``kvlab.codec.klt.codec:KltCodec``."""

UNSTORED = ("noise", "cast", "isotropic")
"""Controls of measurements: they change a tensor and write no codes, so no file and no cache can be made of them."""
