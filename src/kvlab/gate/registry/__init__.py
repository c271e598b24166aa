"""Which mechanisms and which evals there are: two data files, the entries that they may hold, and what can be wrong."""

from kvlab.gate.registry.contents import Registry
from kvlab.gate.registry.entries import Eval, Mechanism, Metric
from kvlab.gate.registry.reading import SCHEMA_VERSION, SHIPPED, RegistryError, load, parse, problems

__all__ = [
    "SCHEMA_VERSION",
    "SHIPPED",
    "Eval",
    "Mechanism",
    "Metric",
    "Registry",
    "RegistryError",
    "load",
    "parse",
    "problems",
]
