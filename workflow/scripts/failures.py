"""What failed in a run, and why, from Snakemake's own logs and those of its jobs."""

import re
from pathlib import Path


def told(snakemake_logs):
    """What failed and why: how each failed job ended, its log, and the log's last line."""
    text = "".join(Path(path).read_text() for path in snakemake_logs)
    failed = re.findall(r"^Error in \w+ (\w+):.*?^    log: (\S+)", text, re.M | re.S)
    lines = [f"{name} failed; {path} ends with\n    {last_line(Path(path))}" for name, path in failed]
    if re.search(r"died with <Signals|exit status (137|143)\b", text):
        lines.append("A job was killed from outside; without a reason in its log that is often a lack of memory.")
    return "\n".join([*lines, "Mend that and type the same command again: what is done stays done."])


def last_line(path):
    """The last words of a log; a progress bar overwrites its line, so those are lines too."""
    text = path.read_text(errors="replace") if path.exists() else ""
    words = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return words[-1] if words else "nothing: it was killed at once, or a folder could not be written"
