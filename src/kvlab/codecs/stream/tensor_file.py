"""A safetensors file written tensor by tensor, for what is too large to be held at once.

    file := u64 bytes of the header (little-endian), JSON header padded with spaces, data of the tensors

The header gives each tensor's dtype, shape and place. Sizes are therefore told first, then the tensors come
in the same order.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor

from kvlab.core.errors import StorageError

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ALIGNMENT = 8  # of the data's first byte


class TensorFileWriter:
    """Writes tensors of one dtype into an open file; `add` them in the order of `shapes`.

    Parameters
    ----------
    file : BinaryIO
        Empty and open for writing.
    dtype : str
        A name of `DTYPES`.
    shapes : dict of str to tuple of int
        Name and shape of every tensor.
    metadata : dict of str to str
        The header's ``__metadata__``.
    """

    def __init__(self, file: BinaryIO, dtype: str, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]):
        self._file, self._dtype, self._due = file, getattr(torch, dtype), iter(shapes.items())
        header, at = {"__metadata__": metadata}, 0
        for name, shape in shapes.items():
            end = at + prod(shape) * self._dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        file.write(struct.pack("<Q", len(text)) + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor in the file's dtype; `StorageError` when another name or shape is due."""
        expected = next(self._due, None)
        if expected != (name, tuple(tensor.shape)):
            raise StorageError(
                f"tensor {name!r} of shape {list(tensor.shape)} where {expected} is due", code="storage.out-of-order"
            )
        values = tensor.detach().to("cpu", self._dtype).contiguous()
        self._file.write(memoryview(values.view(torch.uint8).numpy()))

    def close(self) -> None:
        """`StorageError` when tensors are missing. The file itself stays open."""
        missing = next(self._due, None)
        if missing is not None:
            raise StorageError(
                f"the file is not complete: tensor {missing[0]!r} was never added", code="storage.incomplete"
            )
