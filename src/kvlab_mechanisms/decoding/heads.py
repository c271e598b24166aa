"""Heads that draft from the target's own hidden state: Hydra (Ankner et al. 2024, 2402.05109, section 3).

Medusa (Cai et al. 2024, 2401.10774) gives each of the next places a head of its own that sees the hidden state alone:
a drafted token does not know the one before it. Hydra hands each head the embeddings of what was drafted before it.
With h the last hidden state, e_0 the embedding of the token that h led to and e_j of the j-th drafted one,

.. math:: z_i = h + \\mathrm{SiLU}(W_i [h; e_0; \\ldots; e_{i-1}] + b_i), \\qquad
    q_i = \\mathrm{softmax}(U z_i), \\qquad i = 1 \\ldots n

where U is the model's own output matrix. Heads start as the model itself (W = 0) and are trained on text that the model
has read, its weights frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache

from kvlab.core.errors import ModelError
from kvlab.core.records import atomic
from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.sampler import DRAFTER, uniform
from kvlab_mechanisms.decoding.verify import Draft, inverse


class Heads(nn.Module):
    """One layer for each drafted place.

    Parameters
    ----------
    width : int
        Of hidden states and embeddings.
    places : int
        Tokens of a draft, at most.
    """

    def __init__(self, width: int, places: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear((place + 2) * width, width) for place in range(places))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor, drafted: Tensor) -> Tensor:
        """The state that the next drafted token is read from.

        Parameters
        ----------
        hidden : Tensor [..., width]
        drafted : Tensor [..., tokens, width]
            Embeddings of the token that `hidden` led to and of those drafted since, 1 to `places` of them.
        """
        layer = self.layers[drafted.shape[-2] - 1]
        return hidden + nn.functional.silu(layer(torch.cat([hidden, drafted.flatten(-2)], dim=-1)))

    def loss(self, hidden: Tensor, ids: Tensor, embed: Tensor, unembed: Tensor) -> Tensor:
        """Mean cross-entropy of all places, nats per token.

        Parameters
        ----------
        hidden : Tensor [tokens, width]
            Of a text, at each token.
        ids : int64 Tensor [tokens]
        embed, unembed : Tensor [vocabulary, width]
            The model's embeddings and its output matrix.
        """
        losses = []
        for places in range(1, len(self.layers) + 1):
            count = len(ids) - 1 - places
            drafted = torch.stack([embed[ids[1 + j : 1 + j + count]] for j in range(places)], dim=1)
            z = self(hidden[:count], drafted) @ unembed.T
            losses.append(nn.functional.cross_entropy(z, ids[1 + places :]))
        return torch.stack(losses).mean()

    def save(self, path: Path) -> None:
        """As safetensors, whole or not at all."""
        with atomic(path) as temporary:
            save_file(self.state_dict(), temporary)

    @classmethod
    def load(cls, path: Path) -> Heads:
        """What `save` wrote; `ModelError` for a file that holds no heads."""
        state = load_file(path)
        if "layers.0.bias" not in state:
            raise ModelError(f"{path} holds no heads; write them with Heads.save", code="model.no-heads")
        heads = cls(len(state["layers.0.bias"]), len(state) // 2)
        heads.load_state_dict(state)
        return heads


def fit_heads(
    model: nn.Module, texts: Sequence[Tensor], places: int, steps: int, rate: float = 1e-3, seed: int = 0
) -> Heads:
    """Heads for a frozen model, by Adam over its hidden states of some texts.

    Parameters
    ----------
    texts : sequence of int64 Tensor [tokens]
        Each longer than `places` + 1.
    steps : int
        One text each.
    """
    embed, unembed = matrices(model)
    with torch.no_grad():
        read = [(model(ids[None], output_hidden_states=True).hidden_states[-1][0], ids) for ids in texts]
    heads = Heads(embed.shape[1], places).to(embed.device)
    optimiser = torch.optim.Adam(heads.parameters(), rate)
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        hidden, ids = read[int(torch.randint(len(read), (1,), generator=order))]
        optimiser.zero_grad()
        heads.loss(hidden, ids, embed, unembed).backward()
        optimiser.step()
    return heads.eval()


def matrices(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The embeddings of a model and its output matrix, both [vocabulary, width]."""
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


class HeadDrafter:
    """Drafts chains with heads.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    heads : Heads
    own : Sampling
        At temperature 0 a chain begins with each of the likeliest tokens and goes on greedily; else each is drawn.
    chains : int
    """

    def __init__(self, model: nn.Module, heads: Heads, own: Sampling, chains: int = 1):
        self.heads, self.own, self.chains = heads, own, chains
        self.embed, self.unembed = matrices(model)
        self.cache = DynamicCache(config=model.config)
        self._hidden: Tensor | None = None

    def observe(self, hidden: Tensor) -> None:
        """See `speculate.Drafter`."""
        self._hidden = hidden

    @torch.no_grad()
    def draft(self, text: Sequence[int], tokens: int, step: int) -> Draft:
        """Chains; see `speculate.Drafter`. No longer than there are heads."""
        tokens = min(tokens, len(self.heads.layers))
        chains, rows = [], []
        for chain in range(self.chains):
            ids, own_rows = [text[-1]], []
            for place in range(tokens):
                state = self.heads(self._hidden, self.embed[ids])
                z = nn.functional.linear(state[None], self.unembed)[0]  # twice as fast as a product with a vector
                if self.own.temperature == 0:
                    ids.append(int(z.topk(self.chains).indices[chain]) if place == 0 else int(z.argmax()))
                else:
                    own_rows.append(law(z[None], [self.own]).dense(len(z))[0])
                    ids.append(inverse(own_rows[-1], uniform(self.own.seed, step, chain * tokens + place, DRAFTER)))
            chains.append(ids[1:])
            rows.append(own_rows)
        return Draft(chains, None if self.own.temperature == 0 else lambda chain, depth: rows[chain][depth])
