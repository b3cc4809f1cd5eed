"""The model and step of the source documents, in their style: what a reader has before any lever is pulled.

Attention by hand with a causal mask and dropout, RoPE by complex numbers, a norm by hand, three projections, dropout 0.1; 32 bits, AdamW as
PyTorch gives it, every operation on its own. Same layers, widths and vocabulary as `MiniGPT`, and the same number of weights."""
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.transformer import GPTConfig, rope_table

DROP_RATE = 0.1


def rotate(
    x: Tensor,  # (B, T, H, D)
    pos_cis: Tensor,  # complex (T, D/2)
) -> Tensor:
    "RoPE on neighbouring pairs, as a product of complex numbers"
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, H, D/2)
    return torch.view_as_real(pairs * pos_cis[:, None]).flatten(-2).type_as(x)


class HandNorm(nn.Module):
    "RMSNorm, operation by operation"

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class HandAttention(nn.Module):
    "Attention with the whole matrix of scores"

    def __init__(self, config: GPTConfig):
        super().__init__()
        C, T, self.n_heads = config.emb_dim, config.context_length, config.n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.weight_drop, self.drop = nn.Dropout(DROP_RATE), nn.Dropout(DROP_RATE)
        self.register_buffer("mask", torch.full((T, T), -math.inf).triu(1), persistent=False)

    def forward(self, x: Tensor, pos_cis: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)) for layer in (self.query, self.key, self.value))  # (B, T, H, D)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, pos_cis), rotate(k, pos_cis), v))  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.mask[:T, :T]
        weights = self.weight_drop(F.softmax(scores, dim=-1))
        return self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))


class HandBlock(nn.Module):
    "Attention, then a gated feed-forward"

    def __init__(self, config: GPTConfig):
        super().__init__()
        C, hidden = config.emb_dim, config.hidden_dim
        self.norm1, self.attn, self.norm2 = HandNorm(C, config.norm_eps), HandAttention(config), HandNorm(C, config.norm_eps)
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((C, hidden), (C, hidden), (hidden, C)))
        self.drop = nn.Dropout(DROP_RATE)

    def forward(self, x: Tensor, pos_cis: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), pos_cis)
        h = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))


class PlainGPT(nn.Module):
    "Ids in, logits out"

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embed, self.drop = nn.Embedding(config.vocab_size, config.emb_dim), nn.Dropout(DROP_RATE)
        self.blocks = nn.ModuleList(HandBlock(config) for _ in range(config.n_layers))
        self.norm, self.head = HandNorm(config.emb_dim, config.norm_eps), nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("pos_cis", rope_table(config.head_dim, config.context_length, config.rope_theta), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, idx: Tensor) -> Tensor:
        "(B, T) ids -> (B, T, V) logits"
        x = self.drop(self.embed(idx))
        for block in self.blocks:
            x = block(x, self.pos_cis[: idx.shape[1]])
        return self.head(self.norm(x))
