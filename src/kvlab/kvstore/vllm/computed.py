"""How the tokens of a snapshot went through the model, which may change the last bits of their K and V."""

from __future__ import annotations

COMPUTED = "computed"  # the key in a manifest's `made`
PREFILL = "prefill"  # many tokens a forward
DECODED = "prefill, decode"  # one token a forward for some of them, or for what is not known to be prefilled
