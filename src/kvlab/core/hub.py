"""Ids of the Hugging Face hub: told from folders, and looked for in the local cache. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.errors import suggestion

GGUF = ".gguf"


def reads_as_id(name: str) -> bool:
    """Whether a name that is no folder reads as a hub id (owner/name) and as no path."""
    path = Path(name)
    return not (path.is_absolute() or name.startswith(".") or name.count("/") != 1 or path.parent.is_dir())


def copies(name: str) -> list[Path]:
    """The folders in the local cache that hold a hub id's model, one for each revision, the newest first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    found = [config.parent for config in folder.glob("*/config.json")]
    return sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)


def unpinned(name: str) -> str:
    """Why a hub id without a revision is refused, and which revisions there are to name; in one line."""
    known = [copy.name for copy in copies(name)]
    held = f"the local cache holds {', '.join(known)}" if known else "the local cache holds none"
    return f"model {name!r} is no folder here, so it is a hub id; pin it with `revision` (a commit or a tag); {held}"


def no_folder(name: str) -> str:
    """Why a name is no folder of a model, and what to do; in one line."""
    path = Path(name)
    if path.is_file():
        return f"{name!r} is a file; give the folder of a Hugging Face model{of_gguf(path)}"
    if not reads_as_id(name):
        return f"model directory {name!r} does not exist{beside(name)}"
    first = f"there is no folder {name!r}, which reads as an id of the Hugging Face hub (owner/name)"
    if known := copies(name):
        more = f" ({len(known)} revisions are there)" if len(known) > 1 else ""
        return f"{first}; here a folder is needed: the local cache holds its copy, give {known[0]}{more}"
    return (
        f"{first} and is not in the local cache; get it with `hf download {name}`, for a certain commit or tag with"
        " --revision, and give the folder that this prints"
    )


def beside(name: str) -> str:
    """A hint at the folder there whose name is the most alike; empty where none is."""
    parent = Path(name).parent
    return suggestion(name, [str(p) for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else [])


def of_gguf(file: Path) -> str:
    """How a GGUF file becomes a folder; empty for another file."""
    if file.suffix != GGUF:
        return ""
    return f"; make one of {file.name} with `kvlab weights {file} --out NEW`"
