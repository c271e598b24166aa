"""No codec: K and V pass through unchanged."""

from __future__ import annotations

from kvlab.core.codec_settings import IdentityStream, Plugin

CODEC = Plugin(IdentityStream, "kvlab.codecs.identity.codec:IdentityCodec", control=True)
