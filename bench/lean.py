"""GPT-2 as the small, fast repositories write it (in nanoGPT's style; the code is ours): compiled, in 16 bits.

One product for queries, keys and values, PyTorch's attention or four lines of it, LayerNorm without bias, GELU on four widths, learned positions,
the embedding used again as the head. Its weights are within five per cent of `MiniGPT`'s of the same layers, width and heads."""
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.speed import fused_attention
from minigpt.transformer import GPTConfig

from .contenders import FASTER, PlainLoop, contender
from .work import SEED


class LeanBlock(nn.Module):
    "Attention, then a feed-forward, each on a norm of its input"

    def __init__(self, config: GPTConfig, sdpa: bool):
        super().__init__()
        C, T, self.n_heads, self.sdpa = config.emb_dim, config.context_length, config.n_heads, sdpa
        self.norm1, self.norm2 = (nn.LayerNorm(C, bias=False) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)))
        self.register_buffer("future", torch.ones(T, T, dtype=torch.bool).triu(1), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        "(B, H, T, D) each"
        if self.sdpa:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return F.softmax(scores.masked_fill(self.future, -math.inf), dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)]
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LeanGPT(nn.Module):
    "(B, T) ids -> (B, T, V) logits"

    def __init__(self, config: GPTConfig, sdpa: bool):
        super().__init__()
        C = config.emb_dim
        self.tokens, self.positions = nn.Embedding(config.vocab_size, C), nn.Embedding(config.context_length, C)
        self.blocks = nn.Sequential(*(LeanBlock(config, sdpa) for _ in range(config.n_layers)))
        self.norm, self.head = nn.LayerNorm(C, bias=False), nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # what adds to the residual stream starts smaller
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layers) if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(idx) + self.positions.weight[: idx.shape[1]])))


@contender("lean GPT-2, bf16, compiled", dtype="bfloat16", attention=FASTER, compiled=True, loop="plain", optimizer="AdamW, fused", dropout=0.0)
def lean(work):
    torch.manual_seed(SEED)
    sdpa = fused_attention(work.device, work.config.context_length)
    return PlainLoop(work, LeanGPT(work.config, sdpa), dtype="bfloat16", compiled=True)
