"""What the connector is told: in vLLM's configuration for all requests, and by a request for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvlab.core.counts import counted
from kvlab.core.errors import ParamsError, UnknownName
from kvlab.kvstore.snapshot.format import MAX_CHUNK_TOKENS

CONNECTOR, MODULE = "SnapshotConnector", "kvlab.kvstore.vllm.connector"
OURS = "kvlab"  # the key of a request's `kv_transfer_params` that is meant for this connector, and of its answer
Save = Literal["prompt", "answer", "never"]


@dataclass(frozen=True)
class ConnectorSettings:
    """What holds for all requests of an engine.

    Parameters
    ----------
    folder : str
        Of the snapshots; every file in it that does not begin with a dot is looked at.
    chunk_tokens : int
        Tokens of a chunk, of any relation to vLLM's block size.
    salt : str
        Keeps contexts apart that must not be shared, see `Identity`.
    across_engines : bool
        Restore also what another engine saved, and save what another engine may restore. Their K and V of the same
        tokens agree up to rounding only, so that a warm run is then no longer the cold run, bit for bit.
    restore : bool
        Whether requests are begun from snapshots.
    save : {"prompt", "answer", "never"}
        Save a prompt when it has been computed; or that, and again with the answer when the request ends; or nothing.
    recipe : str
        What `kvlab calibrate` wrote, or `kvlab recipe`: how K and V are stored in the snapshots that are saved and
        restored. As they are when empty.
    bits : float or None
        Of a recipe of archive, others than its own.
    unproven : bool
        Restore lossy snapshots that name no evidence of what that costs; those that are saved here name none.

    Raises
    ------
    ParamsError
        When one of them is not of its kind.
    UnknownName
        When `save` is none of these.
    """

    folder: str
    chunk_tokens: int = 64
    salt: str = ""
    across_engines: bool = False
    restore: bool = True
    save: Save = "prompt"
    recipe: str = ""
    bits: float | None = None
    unproven: bool = False

    def __post_init__(self) -> None:
        counted("chunk_tokens", self.chunk_tokens, least=1)
        if self.chunk_tokens > MAX_CHUNK_TOKENS:
            raise ParamsError(
                f"chunk_tokens is {self.chunk_tokens}; a snapshot allows {MAX_CHUNK_TOKENS} at most",
                code="params.chunk-too-long",
            )
        kinds = {"folder": str, "salt": str, "across_engines": bool, "restore": bool, "recipe": str, "unproven": bool}
        for name, kind in kinds.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise ParamsError(
                    f"{name} of the snapshot connector is {given!r}, which is no {kind.__name__}", code="params.kind"
                )
        if self.bits is not None and not (self.recipe and isinstance(self.bits, int | float)):
            raise ParamsError(
                f"bits of the snapshot connector is {self.bits!r}; it is a number, and goes with recipe",
                code="params.bits",
            )
        if not self.folder:
            raise ParamsError(
                "the snapshot connector needs a folder; give `folder` in kv_connector_extra_config",
                code="params.no-folder",
            )
        if self.save not in get_args(Save):
            raise UnknownName("save of the snapshot connector", self.save, get_args(Save))

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """From vLLM's ``kv_connector_extra_config``; `UnknownName` for a key that there is not."""
        names = [field.name for field in fields(cls)]
        for name in extra:
            if name not in names:
                raise UnknownName("setting of the snapshot connector", name, names)
        return cls(**{"folder": "", **extra})


def transfer_config(folder: Path | str, **settings) -> dict[str, Any]:
    """What vLLM's ``KVTransferConfig`` takes, or as JSON ``vllm serve --kv-transfer-config``.

    Parameters
    ----------
    folder : Path or str
        Of the snapshots.
    **settings
        See `ConnectorSettings`.

    Returns
    -------
    dict
        With the failure policy ``recompute``: a snapshot that turns out damaged while it is loaded is a cold miss.
        Under vLLM's own policy, ``fail``, such a request ends with an error.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": asdict(ConnectorSettings(str(folder), **settings)),
    }


@dataclass(frozen=True)
class Wish:
    """What one request asks for itself, in ``kv_transfer_params={"kvlab": {"restore": False}}``.

    Nothing here raises: vLLM would take its engine down, and all other requests with it.
    """

    restore: bool
    save: bool

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Wish:
        """Only what is switched off by ``False`` is off."""
        ours = (params or {}).get(OURS)
        ours = ours if isinstance(ours, Mapping) else {}
        return cls(*(ours.get(field.name) is not False for field in fields(cls)))
