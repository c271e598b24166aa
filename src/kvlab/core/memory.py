"""What becomes of memory that tensors give back."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt(3)
MAPPED_APART = 32 * 2**20  # bytes; the most that glibc takes
KEPT = 512 * 2**20  # bytes


def keep_freed() -> None:
    """Let the C library keep what is freed for the next tensor, up to `KEPT` bytes.

    Scoring makes and frees tensors of megabytes by the thousand. Left to itself glibc hands each back to the system
    and is given empty pages for the next, which took a sixth of the time. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_APART)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def give_back() -> None:
    """Hand the system what lies free between tensors that stay: called once a window, that costs nothing to speak of.

    With a large vocabulary, logits of many megabytes leave holes that the next ones do not fit into. What `keep_freed`
    keeps grew by up to a gigabyte a window, though the tensors themselves took the same all the time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
