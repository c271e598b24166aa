"""A recipe inside vLLM: ``KVLAB_PAGES=file`` or ``KVLAB_RECIPE=file`` before ``LLM(...)`` or ``vllm serve``.

vLLM calls `register` in each of its processes (entry-point group ``vllm.general_plugins``). Without a variable
nothing happens.

- ``KVLAB_PAGES``: vLLM's own cache holds the coded bytes, and several times the tokens in the same memory
  (`kvlab.cache.pages`).
- ``KVLAB_RECIPE``: every K and V is encoded and decoded where it appears, before the rotary embedding and vLLM's own
  cache write (`in_forward`). The *damage* of a recipe is simulated, for any codec that codes tokens one by one: vLLM's
  cache keeps its dtype and its size.

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
from types import ModuleType
from typing import Any

from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import PAGES_VARIABLE, RECIPE_VARIABLE

STATUS_METHOD = "kvlab_status"
PAGES_BACKEND = "kvlab.cache.pages.backend.PagesBackend"


def register() -> None:
    """What vLLM calls; does nothing unless ``KVLAB_RECIPE`` or ``KVLAB_PAGES`` names a recipe file.

    Raises
    ------
    UserError
        The file cannot be read, is no recipe, or asks for a codec that cannot run where requests mix.
    CapabilityError
        This vLLM lacks one of the places that the plugin takes hold of, or both variables are set.
    """
    _mend_llvmlite()
    chosen = _chosen()
    if chosen is None:
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    chosen.read_recipe()
    place_backend()
    _wrap(WorkerWrapperBase, "init_device", _around_init_device)
    _wrap(WorkerWrapperBase, "initialize_from_config", _around_cache)
    arguments = sys.modules.get("vllm.engine.arg_utils")  # only the user's own process has it, and needs it
    if arguments is not None:
        _wrap(arguments.EngineArgs, "create_engine_config", _after_config)


def _mend_llvmlite() -> None:
    """Let llvmlite's wrapper of its library have no attributes with two underscores in front.

    It answers every name with a function of that library, ``__dict__`` too. When vLLM 0.32 starts, it takes the
    ``__dict__`` of all that modules hold, and fails where numba was loaded before, as by `kvlab.Cache`.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None and hasattr(type(ffi.lib), "__getattr__"):
        _wrap(type(ffi.lib), "__getattr__", _refuse_underscores)


def _refuse_underscores(answered: Callable, lib: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return answered(lib, name)


def _chosen() -> ModuleType | None:
    """What serves the variable that is set: `vllm.worker` beside vLLM's cache, `pages.worker` inside it."""
    recipe, pages = (os.environ.get(variable) for variable in (RECIPE_VARIABLE, PAGES_VARIABLE))
    if recipe and pages:
        raise CapabilityError(
            f"{RECIPE_VARIABLE} and {PAGES_VARIABLE} are both set, and K and V would be coded twice; unset one of them",
            code="capability.coded-twice",
        )
    if pages:
        from kvlab.cache.pages import worker

        return worker
    if recipe:
        from kvlab.cache.vllm import worker as vllm_worker

        return vllm_worker
    return None


def activate(path: Path | str, pages: bool = False) -> None:
    """Set the variable for this process and its children, also when vLLM has loaded its plugins already.

    Parameters
    ----------
    path : Path or str
        The recipe file.
    pages : bool
        Whether vLLM's own cache is to hold the coded bytes (``KVLAB_PAGES``), or to be coded beside
        (``KVLAB_RECIPE``). The other variable is unset.
    """
    import vllm.engine.arg_utils  # noqa: F401 (so that `register` finds it)

    chosen, other = (PAGES_VARIABLE, RECIPE_VARIABLE) if pages else (RECIPE_VARIABLE, PAGES_VARIABLE)
    os.environ.pop(other, None)
    os.environ[chosen] = str(Path(path).absolute())
    register()


@dataclass(frozen=True)
class Pages:
    """What vLLM's cache holds where its pages are coded ones.

    Parameters
    ----------
    bytes_per_token, plain_bytes_per_token : int
        What a token takes in all layers, and what it would in the model's dtype.
    block_size, blocks : int
        Tokens of a block, and vLLM's own count of blocks (``num_gpu_blocks``).
    canary_kl : float
        Nats by which the next token's distribution moved when the coded pages of a trial text were zeroed.
    sink, recent : int
        First and last tokens of a request that are read exact.
    exact_bytes : int
        What these take beside the pages, in all layers, for one request.
    requests : int
        For how many requests this was taken from vLLM's memory for its cache (``max_num_seqs``).
    """

    bytes_per_token: int
    plain_bytes_per_token: int
    block_size: int
    blocks: int
    canary_kl: float
    sink: int = 0
    recent: int = 0
    exact_bytes: int = 0
    requests: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.blocks * self.block_size


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
        Of the codec's arrays per stream, without the headers of a stream; None before the first pass. Of coded pages,
        what they take.
    pages : Pages or None
        Of ``KVLAB_PAGES``; None where vLLM's own cache is kept (``KVLAB_RECIPE``).
    """

    recipe_id: str
    model_hash: str
    calibration_hash: str | None
    layers: tuple[int, ...]
    steps: int
    tokens: int
    fires: dict[str, tuple[int, ...]]
    bits_per_value: dict[str, float | None]
    pages: Pages | None = None

    @classmethod
    def from_answer(cls, answer: dict[str, Any]) -> Status:
        """From what a worker answers to ``collective_rpc("kvlab_status")``."""
        fires = {stream: tuple(counts) for stream, counts in answer["fires"].items()}
        pages = Pages(**answer["pages"]) if answer.get("pages") else None
        return cls(**(answer | {"layers": tuple(answer["layers"]), "fires": fires, "pages": pages}))


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
            f"no recipe is active in this vLLM ({error}); set {RECIPE_VARIABLE} or {PAGES_VARIABLE} before the first"
            " engine of the process, or call kvlab.cache.vllm_plugin.activate; if VLLM_PLUGINS is set, it must name"
            " kvlab",
            code="not-active.no-recipe",
        ) from None
    return Status.from_answer(answers[0])


def _after_config(create: Callable, args, *given, **named):
    config = create(args, *given, **named)
    place_backend()  # or away, where the variable has been unset since
    if (chosen := _chosen()) is not None:
        from kvlab.cache.vllm import settings as vllm_settings

        chosen.prepare(config)  # a refusal here reaches the person as it is, one in the worker only its log
        vllm_settings.fit_cache(config)
    return config


def place_backend() -> None:
    """Put the backend of coded pages in the place of ``CPU_ATTN`` where ``KVLAB_PAGES`` is set, else take it away.

    vLLM's CPU platform names that backend whatever is asked for.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    backend = AttentionBackendEnum.CPU_ATTN
    ours = backend.get_path() == PAGES_BACKEND
    if bool(os.environ.get(PAGES_VARIABLE)) == ours:
        return
    if ours:
        backend.clear_override()
    else:
        register_backend(backend, PAGES_BACKEND)
    _cached_get_attn_backend.cache_clear()


def _around_init_device(init_device: Callable, wrapper):
    if (chosen := _chosen()) is None:
        return init_device(wrapper)
    served = chosen.prepare(wrapper.vllm_config)  # before vLLM takes torch's number of threads out of everyone's hands
    answer = init_device(wrapper)
    chosen.arm(wrapper.worker, served)
    return answer


def _around_cache(initialize: Callable, wrapper, *given, **named):
    chosen = _chosen()
    if chosen is not None and not hasattr(wrapper.worker, STATUS_METHOD):
        raise CodecNotActive(
            "vLLM loaded its model past the hooks of kvlab's recipe; it would be served uncoded",
            code="not-active.no-hooks",
        )
    answer = initialize(wrapper, *given, **named)
    if chosen is not None:
        chosen.confirm(wrapper.worker)
    return answer


def _wrap(owner: type, name: str, around: Callable) -> None:
    """Put `around` about a method, once per process however often vLLM loads its plugins."""
    method = getattr(owner, name, None)
    if method is None:
        from vllm import __version__

        raise CapabilityError(
            f"vLLM {__version__} has no {owner.__name__}.{name}, which kvlab's plugin needs; it knows vLLM 0.32;"
            f" unset {RECIPE_VARIABLE} and {PAGES_VARIABLE}, or install that version",
            code="capability.vllm-version",
        )
    if getattr(method, "kvlab", False):
        return

    @functools.wraps(method)
    def wrapped(self, *given, **named):
        return around(method, self, *given, **named)

    wrapped.kvlab = True
    setattr(owner, name, wrapped)
