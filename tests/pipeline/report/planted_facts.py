"""The ladder's facts with planted weights of calibrations and planted coding gains."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.params import Params
from kvlab.core.records import Provenance, write_json
from kvlab_pipeline.studies.ladder.record import Artefact, Facts, FittedGain, Gain, calibrated_rungs, gain_windows

GAIN = {"k": 6.02, "v": 3.01}


def write_facts(folder: Path, params: Params, provenance: Provenance) -> Path:
    """The ladder's facts: calibrations of 1,000 bytes a layer, K with 6.02 dB to gain, V with half of that."""
    weighs = 1000 * params.model.n_layers
    facts = Facts(
        provenance=provenance,
        origin=params.calibration.origin,
        calibration_tokens=params.windows.calib * params.windows.context,
        values_per_token=128 * params.model.n_layers,
        context=params.windows.context,
        artefacts=tuple(
            Artefact(recipe_id=one.recipe_id, whole_bytes=4 * weighs, decoder_bytes=weighs // 2, resident_bytes=weighs)
            for one in calibrated_rungs(params)
        ),
        fitted=tuple(FittedGain(stream=s, over_even=GAIN[s] + 1, over_plain=GAIN[s] + 2) for s in "kv"),
        gains=tuple(
            Gain(stream=s, window=w, tokens=tokens, over_even=GAIN[s] + 0.01 * (w % 3), over_plain=GAIN[s] + 1)
            for w in range(gain_windows(params))
            for s in "kv"
            for tokens in ("all", "later")
        ),
    )
    path = folder / "results" / "ladder" / "facts.json"
    write_json(path, facts.model_dump(mode="json"))
    return path
