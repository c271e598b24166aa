"""A codec asked again, with what it writes put down in a file and read back from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from kvlab.base.recipe import Recipe
from kvlab.calibration.archive import Archive
from kvlab.calibration.whole import Whole
from kvlab.codec.base import Codec, Site
from kvlab.codec.stream.bitstream import frame_bytes, read_frame

Places = Iterable[tuple[int, str]]


def answers(codecs: Mapping[tuple[int, str], Codec], given: Mapping, window: int) -> tuple[dict, int]:
    """What each place's codec makes of the tensor that it was given, and the bytes of all files that it wrote.

    Parameters
    ----------
    codecs : mapping
        (layer, ``"k"`` or ``"v"``) -> the codec of that place.
    given : mapping
        By the same places, the tensors [kv_heads, tokens, head_dim].
    """
    found: dict[tuple[int, str], Tensor] = {}
    nbytes = 0
    with TemporaryDirectory() as folder:
        for (layer, part), codec in codecs.items():
            x = given[layer, part]
            encoded = codec.encode(x, Site(window, layer, part))
            if encoded.packed:
                path = Path(folder, f"{layer}{part}")
                path.write_bytes(frame_bytes(encoded))
                nbytes += path.stat().st_size
                encoded = read_frame(path.read_bytes()).to(x.device)
            found[layer, part] = codec.decode(encoded).to(x.dtype)
    return found, nbytes


def unarchived(codec: Archive | Whole, recipe: Recipe, stored: bytes, ids: list[int]) -> dict[tuple[int, str], Tensor]:
    """What the file of a whole cache of these tokens holds, by layer and stream."""
    decoded = codec.decode(recipe, stored, ids)
    return {(layer, part): x for layer, k, v in decoded for part, x in (("k", k), ("v", v))}
