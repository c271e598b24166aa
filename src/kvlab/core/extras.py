"""Which extra of kvlab's installs a package that is not there."""

from __future__ import annotations

from kvlab.core.errors import UserError

EXTRAS = {
    "vllm": "vllm",
    "matplotlib": "report",
    "markdown_it": "report",
    "lm_eval": "eval",
    "datasets": "eval",
    "snakemake": "pipeline",
    "dvc": "pipeline",
    "gguf": "gguf",
    "mwparserfromhell": "pipeline",
    "jsonschema": "mechanisms",
    "xgrammar": "mechanisms",
}


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """What to say of an import that failed since an extra was not installed; None for any other."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return UserError(f"this needs the package {package}; install it with: pip install 'kvlab[{EXTRAS[package]}]'")
