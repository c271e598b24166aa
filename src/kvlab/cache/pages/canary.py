"""Do the logits hang on the coded pages? A trial text is served twice from them, and once after they were zeroed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvlab.base.errors import CodecNotActive
from kvlab.base.records import CANARY_MIN, TWO_PASSES
from kvlab.cache.pages.attention import Step
from kvlab.stats.divergences import token_record

TOKENS = 24
SHARE = 0.01  # of what zeroed pages move


@torch.inference_mode()
def canary_kl(runner, attentions: Sequence[nn.Module], block_size: int) -> float:
    """Nats that zeroed pages move the distribution after a trial text by.

    The text is computed in one pass, then its last token alone over the pages that the pass wrote, then the same once
    more over zeros. Its block is the last one, which is left zero.

    Parameters
    ----------
    runner
        vLLM's model runner, its cache allocated.
    attentions : sequence of Module
        The layers' attention modules.
    block_size : int
        Tokens of a block.

    Raises
    ------
    CodecNotActive
        A token over the pages does not say what it says in one pass, or zeros make no difference.
    """
    config = runner.vllm_config
    tokens = min(TOKENS, block_size, config.model_config.max_model_len - 1)
    trial = Trial(runner, [attention.layer_name for attention in attentions], block_size, tokens)
    whole, over = trial.last_logits(0), trial.last_logits(tokens - 1)
    for attention in attentions:
        attention.kv_cache[trial.block, :, : tokens - 1] = 0
    zeroed = trial.last_logits(tokens - 1)
    for attention in attentions:
        attention.kv_cache[trial.block] = 0
    apart, moved = kl(whole, over), kl(whole, zeroed)
    # what a rounding does to a code is more than the dtype's own, and far less than pages that are not those
    allowed = max(TWO_PASSES[str(config.model_config.dtype).removeprefix("torch.")], SHARE * moved)
    if not apart <= allowed:
        raise CodecNotActive(
            f"a token over coded pages differs by KL {apart:.1e} nats from one pass; allowed: {allowed:.0e}, rounding"
        )
    if not moved >= CANARY_MIN:
        raise CodecNotActive(f"zeroed pages move the logits by KL {moved:.1e} nats only; they are not what is read")
    return moved


class Trial:
    """A text of `tokens` tokens whose pages are the cache's last block."""

    def __init__(self, runner, layers: list[str], block_size: int, tokens: int):
        self.runner, self.layers, self.tokens = runner, layers, tokens
        self.block = runner.kv_cache_config.num_blocks - 1
        # of the dtype that the runner feeds: a compiled model takes its inputs without asking what they are
        ids = torch.arange(tokens) * 7919 % runner.model_config.get_vocab_size()
        self.ids = ids.to(runner.input_ids.gpu.dtype)
        self.block_size = block_size

    def last_logits(self, first: int) -> Tensor:
        """The model's logits [1, vocabulary] after the text, of which tokens from `first` on are computed."""
        from vllm.forward_context import set_forward_context

        step = Step.of([0, self.tokens - first], [self.tokens], torch.tensor([[self.block]]), self.block_size)
        with set_forward_context(
            dict.fromkeys(self.layers, step),
            self.runner.vllm_config,
            num_tokens=step.tokens,
            slot_mapping=dict.fromkeys(self.layers, step.own_slots()),
        ):
            hidden = self.runner.model(
                input_ids=self.ids[first:].clone(),
                positions=step.positions(),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return self.runner.model.compute_logits(hidden[-1:])


def kl(reference: Tensor, other: Tensor) -> float:
    """Between the distributions of two rows of logits, nats."""
    label = torch.zeros(1, dtype=torch.int64)
    return token_record(reference, other, label)["kl"].item()
