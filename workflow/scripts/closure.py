"""Which files of src/ a module's results depend on: itself and whatever it imports, found without running it."""

import ast
from functools import lru_cache
from pathlib import Path

SRC = Path("src")


@lru_cache(None)
def module_file(name):
    """The file of a module under src/, or None when it is somebody else's."""
    path = SRC.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


@lru_cache(None)
def imports(name, path):
    """Names that a module imports, at its top or inside its functions, and its parent package."""
    found = {name.rpartition(".")[0]}
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            near = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*near, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found - {""})


@lru_cache(None)
def code(*modules):
    """The files of `modules` and of everything in src/ that they import, sorted.

    What a module loads by name at run time (an engine, a codec) cannot be seen and is to be named too.
    """
    for name in modules:
        if module_file(name) is None:
            raise ValueError(f"a rule names the module {name!r}, which is not in {SRC}/")
    todo, seen = set(modules), {}
    while todo:
        name = todo.pop()
        path = module_file(name)
        if path is not None:
            seen[name] = str(path)
            todo |= imports(name, path) - seen.keys()
    return tuple(sorted(seen.values()))
