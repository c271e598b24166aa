"""A recipe inside vLLM: ``KVLAB_RECIPE=recipe.json`` before ``LLM(...)`` or ``vllm serve``.

vLLM calls `register` in each of its processes (entry-point group ``vllm.general_plugins``). Without the
variable nothing happens. With it, every K and V is encoded and decoded by the recipe's codecs where it
appears, before the rotary embedding and vLLM's own cache write (`in_forward`).

What is simulated is the *damage* that storage does: vLLM's cache keeps its dtype and its size, no memory is
saved, and time is spent. What a recipe takes to store is measured by ``kvlab``, not here.

A model that is served uncoded by mistake looks like a very good codec. Therefore every way of not being
active ends in an exception: settings under which vLLM would leave the hooks out are refused when its config
is made and again in the worker; a model that was loaded past the hooks gets no cache; and a forward pass in
which any coded layer's K or V did not go through its codec does not return. `status` reads all of it back.

This module must stay light: vLLM loads it whether or not a recipe is set, and would only log its failure.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.base.errors import CapabilityError, CodecNotActive
from kvlab.base.recipe import RECIPE_VARIABLE

STATUS_METHOD = "kvlab_status"


def register() -> None:
    """What vLLM calls; does nothing unless ``KVLAB_RECIPE`` names a recipe file.

    Raises
    ------
    UserError
        The file cannot be read, is no recipe, or asks for a codec that cannot run where requests mix.
    CapabilityError
        This vLLM lacks one of the places that the plugin takes hold of.
    """
    if not os.environ.get(RECIPE_VARIABLE):
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from kvlab.cache import vllm_worker

    vllm_worker.read_recipe()
    _wrap(WorkerWrapperBase, "init_device", _after_init_device)
    _wrap(WorkerWrapperBase, "initialize_from_config", _before_cache)
    arguments = sys.modules.get("vllm.engine.arg_utils")  # only the user's own process has it, and needs it
    if arguments is not None:
        _wrap(arguments.EngineArgs, "create_engine_config", _after_config)


def activate(path: Path | str) -> None:
    """Set ``KVLAB_RECIPE`` for this process and its children, also when vLLM has loaded its plugins already."""
    import vllm.engine.arg_utils  # noqa: F401 (so that `register` finds it)

    os.environ[RECIPE_VARIABLE] = str(Path(path).absolute())
    register()


@dataclass(frozen=True)
class Status:
    """What the plugin has done in a running vLLM.

    Parameters
    ----------
    recipe_id, model_hash : str
        Of the recipe and of the served model.
    calibration_hash : str or None
        Of the calibration's files.
    layers : tuple of int
        The coded layers.
    steps : int
        Forward passes with requests in them; vLLM's own dummy passes are neither coded nor counted.
    tokens : int
        Tokens of these passes. A token that prefix caching took from the cache was coded when it was written.
    fires : dict of str to tuple of int
        Codings per stream and coded layer; each is equal to `steps`.
    bits_per_value : dict of str to float or None
        Of the codec's arrays per stream, without the headers of a stream; None before the first pass.
    """

    recipe_id: str
    model_hash: str
    calibration_hash: str | None
    layers: tuple[int, ...]
    steps: int
    tokens: int
    fires: dict[str, tuple[int, ...]]
    bits_per_value: dict[str, float | None]

    @classmethod
    def from_answer(cls, answer: dict[str, Any]) -> Status:
        """From what a worker answers to ``collective_rpc("kvlab_status")``."""
        fires = {stream: tuple(counts) for stream, counts in answer["fires"].items()}
        return cls(**(answer | {"layers": tuple(answer["layers"]), "fires": fires}))


def status(llm) -> Status:
    """Ask a running `vllm.LLM`, whose model may be in another process, what was coded.

    Raises
    ------
    CodecNotActive
        No recipe is active in it.
    """
    try:
        answers = llm.collective_rpc(STATUS_METHOD)
    except Exception as error:  # vLLM hands errors of another process on as bare `Exception`
        raise CodecNotActive(
            f"no recipe is active in this vLLM ({error}); set {RECIPE_VARIABLE} before the first engine of the"
            " process, or call kvlab.cache.vllm_plugin.activate; if VLLM_PLUGINS is set, it must name kvlab"
        ) from None
    return Status.from_answer(answers[0])


def _after_config(create: Callable, args, *given, **named):
    from kvlab.cache import vllm_worker

    config = create(args, *given, **named)
    if os.environ.get(RECIPE_VARIABLE):
        vllm_worker.prepare(config)  # a refusal here reaches the person as it is, one in the worker only its log
        vllm_worker.fit_cache(config)
    return config


def _after_init_device(init_device: Callable, wrapper):
    from kvlab.cache import vllm_worker

    answer = init_device(wrapper)
    if os.environ.get(RECIPE_VARIABLE):
        vllm_worker.arm(wrapper.worker)
    return answer


def _before_cache(initialize: Callable, wrapper, *given, **named):
    if os.environ.get(RECIPE_VARIABLE) and not hasattr(wrapper.worker, STATUS_METHOD):
        raise CodecNotActive(f"vLLM loaded its model past the hooks of {RECIPE_VARIABLE}; it would be served uncoded")
    return initialize(wrapper, *given, **named)


def _wrap(owner: type, name: str, around: Callable) -> None:
    """Put `around` about a method, once per process however often vLLM loads its plugins."""
    method = getattr(owner, name, None)
    if method is None:
        from vllm import __version__

        raise CapabilityError(
            f"vLLM {__version__} has no {owner.__name__}.{name}, which {RECIPE_VARIABLE} needs; the plugin knows"
            f" vLLM 0.32; unset {RECIPE_VARIABLE} or install that version"
        )
    if getattr(method, "kvlab", False):
        return

    @functools.wraps(method)
    def wrapped(self, *given, **named):
        return around(method, self, *given, **named)

    wrapped.kvlab = True
    setattr(owner, name, wrapped)
