"""What surrounds a call of torch, kept out of what codecs compute and keep.

A caller may run a model under autocast, in inference mode, with gradients or with another default device. Codecs
compute in the dtypes that they name, and a table that is kept serves every later caller. The default dtype is the whole
process's, so that it cannot be set aside for one thread: whoever makes floats here names their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

KINDS = ("cpu", "cuda", "xpu", "mps")  # that autocast knows, of which each thread has its own state
Given, Made = ParamSpec("Given"), TypeVar("Made")


def apart(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function, without gradients, and untouched by autocast, inference mode and the default device.

    What it makes are ordinary tensors, which may be changed in place and saved for a backward pass.
    """

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if not disturbed():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for context in _needed():
                stack.enter_context(context)
            return function(*args, **kwargs)

    return run


def disturbed() -> bool:
    """Whether there is anything here that `apart` keeps out; asked in each call of a codec, so quickly."""
    return (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or any(map(torch.is_autocast_enabled, KINDS))
        or torch.empty(0).device.type != "cpu"
    )


def _needed() -> Iterator[AbstractContextManager]:
    """What has to be entered here, in this order."""
    for kind in KINDS:
        if torch.is_autocast_enabled(kind):
            yield torch.autocast(kind, enabled=False)
    if torch.empty(0).device.type != "cpu":
        yield torch.device("cpu")
    if torch.is_inference_mode_enabled():
        yield torch.inference_mode(False)
    if torch.is_grad_enabled():  # after inference mode, which turns gradients on where it ends
        yield torch.no_grad()
