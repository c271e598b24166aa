"""A file is hashed once in a process, not once for each file that a job makes of it. The Snakefile calls `keep`.

Snakemake notes of every output the checksum of every input, and computes each anew: of a model's weights, as often as
files are made of them.
"""

from __future__ import annotations

import os

from snakemake.io import _IOFile


def keep():
    """Let a file's checksum stand until another size, time or file is there."""
    computed, kept = _IOFile.checksum, {}

    async def checksum(self, threshold=None, force=False, algorithm=None):
        if self.is_storage or not os.path.isfile(self.file):
            return await computed(self, threshold, force, algorithm)
        state = os.stat(self.file)
        key = self.file, state.st_ino, state.st_size, state.st_mtime_ns, threshold, force, algorithm
        if key not in kept:
            kept[key] = await computed(self, threshold, force, algorithm)
        return kept[key]

    _IOFile.checksum = checksum
