"""What verbs were given, read: parameters, fitted files, tiers. Heavy imports happen inside the functions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from kvlab.cli.commands import FromFlags
from kvlab.cli.flags import CodebooksIfCoded, ComponentsFile, ComponentsIfCoded, SigmaFile, SigmaIfCoded, word
from kvlab.core.errors import ParamsError, UserError
from kvlab.core.hub import no_folder
from kvlab.core.params import Model, Params

DEFAULT_PARAMS = "params.yaml"
ParamsText = Annotated[str, word(f"default: {DEFAULT_PARAMS}", metavar="FILE|JSON")]
Slug = Annotated[str | None, word("one of `models`; needed where params.yaml lists several", metavar="SLUG")]
AnyModel = Annotated[str | None, word("folder of a Hugging Face model; or one of params.yaml", metavar="DIR|SLUG")]
IfListed = Annotated[
    str, word(f"for a model that it lists; default: {DEFAULT_PARAMS}, if there is one", metavar="FILE|JSON")
]


def params_of(params: ParamsText = DEFAULT_PARAMS, model: Slug = None) -> Params:
    """What `--params` and `--model` name."""
    from kvlab.cli.packages import reader_of_params

    return reader_of_params().read_params(params, model)


def model_of(model: AnyModel = None, params: IfListed = DEFAULT_PARAMS) -> Model:
    """The model that `--model` names: a folder, which needs no params.yaml, or one of params.yaml.

    Raises
    ------
    UserError
        There is neither.
    ModelError
        The folder is none of a model.
    """
    return folder_of(model, params) or params_of(params, model).model


def folder_of(model: str | None, params: str) -> Model | None:
    """The model of a folder that `--model` names; None where it names one of params.yaml. Raises as `model_of`."""
    from kvlab.core.model import model_in

    path = Path(model or ".")
    if model and ((path / "config.json").is_file() or "/" in model or model in (".", "..")):
        return model_in(path)
    if params == DEFAULT_PARAMS and not Path(params).exists():
        if model and path.is_dir():
            return model_in(path)  # which says what it lacks
        if model:
            raise UserError(
                f"--model {model}: {no_folder(model)}; there is no {DEFAULT_PARAMS} here that could list it"
            )
        raise UserError(f"name the model: --model DIR, its folder (there is no {DEFAULT_PARAMS} here that names one)")
    return None


def bits_of(params: Params, bits: float | None, v_bits: float | None) -> Params:
    """The parameters with the bits of `--bits` and `--v-bits`, where these are given."""
    if bits is None and v_bits is None:
        return params
    bits = params.bits if bits is None else bits
    v_bits = bits if v_bits is None else v_bits
    if not all(1 <= one <= 8 for one in (bits, v_bits)):
        raise ParamsError(f"--bits {bits} and --v-bits {v_bits}; allowed: 1 to 8")
    return params.model_copy(update={"bits": bits, "v_bits": v_bits})


def fitted_of(sigma: SigmaIfCoded = None, codebooks: CodebooksIfCoded = None, components: ComponentsIfCoded = None):
    """The calibration that --sigma, --codebooks and --components name; None without one."""
    from kvlab.calibration.load import FittedFiles

    if sigma is None and (codebooks or components):
        raise UserError("--codebooks and --components belong to a Sigma_q; name it with --sigma")
    return FittedFiles(sigma, codebooks, components) if sigma else None


def transform_of(sigma: SigmaFile, components: ComponentsFile):
    """The calibration of the codecs that need no more than Sigma_q and components."""
    from kvlab.calibration.load import FittedFiles

    return FittedFiles(sigma, components=components)


def key_of(key: Path | None):
    """The key that `--key` names; None without one.

    Raises
    ------
    StorageError
        The file cannot be read.
    UserError
        It is too short or too long for a key.
    """
    from kvlab.codecs.stream.seal import Key

    return None if key is None else Key.read(key)


def tier(text: str) -> str:
    """A tier; the catalogue that lists them is read when one is given."""
    from kvlab.core.errors import UnknownName
    from kvlab.gate.catalogue.columns import TIERS

    if text not in TIERS:
        raise UnknownName("tier", text, TIERS)
    return text


OfParams = Annotated[Params, FromFlags(params_of)]
OfFitted = Annotated[Any, FromFlags(transform_of)]
OfModel = Annotated[Model, FromFlags(model_of)]
