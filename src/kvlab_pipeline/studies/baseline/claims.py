"""Whether the codec costs the same on both engines, from the part ``agreement`` of ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim


def claims(agreement: dict | None) -> list[dict]:
    """What the same codec costs on vLLM beside HF in float32, under every protocol; none with one engine."""
    coded = agreement["codec"] if agreement else {}
    return [
        claim(
            "agreement",
            f"The studied codec on `vllm` in place of `hf`, in float32 (`{protocol}`),",
            entry["difference"],
            entry["compared"],
        )
        for protocol, entry in coded.items()
    ]
