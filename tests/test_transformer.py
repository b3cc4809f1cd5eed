"""The model's promises: equal to the library's, causal, counted, castable, and honest when misused."""
import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from minigpt.transformer import GPTConfig, MiniGPT, apply_rope, causal_attention, dependence, eval_mode, rope_table

torch.set_num_threads(1)

KINDS = [
    dict(),
    dict(flash_attn=True),
    dict(n_kv_heads=2),
    dict(n_kv_heads=1, flash_attn=True),
]


def tiny(seed=0, **fields):
    """A model of a few thousand weights."""
    torch.manual_seed(seed)
    return MiniGPT(GPTConfig(**{**dict(vocab_size=97, context_length=24, emb_dim=32, n_layers=2, n_heads=4), **fields}))


def ids(model, batch=2, length=None, seed=1):
    """Random token ids for a model."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length or model.config.context_length), generator=g)


# ---- pieces against the library

@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_sdpa(kv_heads):
    q = torch.randn(2, 4, 17, 8)
    k, v = torch.randn(2, 2, kv_heads, 17, 8).unbind(0)
    assert_close(causal_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def test_rope_equals_complex_product_and_keeps_length():
    x, table = torch.randn(2, 9, 3, 8), rope_table(8, 9)
    y = apply_rope(x, table)
    turned = torch.complex(*x.chunk(2, -1)) * table[:, None]
    assert_close(y, torch.cat([turned.real, turned.imag], -1))
    assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert_close(y[:, 0], x[:, 0])


def test_rope_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 16)
    table = rope_table(16, 200)
    turn = lambda x: apply_rope(x.expand(1, 200, 1, 16), table)[0, :, 0]
    scores = turn(q) @ turn(k).T
    for distance in (0, 1, 7, 63):
        along = scores.diagonal(-distance)
        assert_close(along, along[:1].expand_as(along), atol=2e-4, rtol=1e-4)


def test_rope_table_is_exact_far_out():
    """Angles are made in float64: at position 100,000 float32 would be off by a hundredth of a turn."""
    far = rope_table(8, 100_001)[-1]
    angle = 100_000 * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert_close(far, torch.polar(torch.ones(4, dtype=torch.float64), angle).to(torch.complex64), atol=1e-6, rtol=0)


# ---- the whole model

@pytest.mark.parametrize("fields", KINDS)
def test_changing_a_token_changes_only_what_follows(fields):
    """The wrong-layout bug (attention over heads) would give the diagonal, a missing mask the full square."""
    model = tiny(**fields).eval()
    x = ids(model, batch=1).clamp(max=95)
    assert torch.equal(dependence(model, x), torch.ones(24, 24).tril().bool())


def test_dependence_tells_the_wrong_layout_from_the_right_one():
    x = torch.randn(1, 4, 6, 8)  # (B, H, T, D)
    as_positions = lambda f: dependence(f, x.transpose(1, 2))
    attend = lambda t: causal_attention(t, t, t)
    assert torch.equal(as_positions(lambda t: attend(t.transpose(1, 2)).transpose(1, 2)), torch.ones(6, 6).tril().bool())
    assert torch.equal(as_positions(attend), torch.eye(6).bool())


@pytest.mark.parametrize("fields", KINDS)
def test_fused_attention_gives_the_same_model(fields):
    plain, fused = tiny(**{**fields, "flash_attn": False}), tiny(**{**fields, "flash_attn": True})
    x = ids(plain)
    (a, loss_a), (b, loss_b) = plain(x, x), fused(x, x)
    loss_a.backward(), loss_b.backward()
    assert_close(a, b)
    for p, q in zip(plain.parameters(), fused.parameters()):
        assert_close(p.grad, q.grad)


@pytest.mark.parametrize("fields", KINDS + [dict(emb_dim=48, n_heads=6, n_kv_heads=3, n_layers=3)])
def test_parameter_count_by_formula(fields):
    model = tiny(**fields)
    assert model.config.n_params() == sum(p.numel() for p in model.parameters())


def test_default_config_is_the_documented_one():
    c = GPTConfig()
    assert (c.n_layers, c.emb_dim, c.n_heads, c.n_kv_heads, c.context_length, c.vocab_size) == (12, 768, 12, 12, 1024, 32000)
    assert (c.head_dim, c.hidden_dim) == (64, 2048)
    with torch.device("meta"):
        assert sum(p.numel() for p in MiniGPT(c).parameters()) == c.n_params()


@pytest.mark.parametrize("seed", [0, 1])
def test_t28_first_loss_is_ln_vocab(seed):
    """T28: |first loss - ln V| < 0.2."""
    model = tiny(seed, vocab_size=256, emb_dim=64)
    _, loss = model(ids(model, 8), ids(model, 8, seed=2))
    assert abs(loss.item() - math.log(256)) < 0.2


@pytest.mark.parametrize("flash_attn", [False, True])
def test_t20_dropout_is_off_in_eval_mode(flash_attn):
    """T20: eval twice is bit-equal and equals dropout 0; training does drop."""
    wet, dry = tiny(drop_rate=0.5, flash_attn=flash_attn), tiny(flash_attn=flash_attn)
    x = ids(wet)
    assert not torch.equal(wet(x), wet(x))
    wet.eval()
    assert torch.equal(wet(x), wet(x))
    assert torch.equal(wet(x), dry(x))


def test_loss_is_the_mean_over_counted_targets_in_float32():
    model = tiny().bfloat16()
    x = ids(model)
    targets = x.clone()
    targets[:, ::2] = -100
    logits, loss = model(x, targets)
    assert loss.dtype == torch.float32
    assert_close(loss, F.cross_entropy(logits[:, 1::2].flatten(0, 1).float(), targets[:, 1::2].flatten()))


@pytest.mark.parametrize("fields", KINDS)
def test_autocast_changes_the_loss_a_little_only(fields):
    model = tiny(**fields)
    x = ids(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(x, x)
    assert loss.dtype == torch.float32
    assert_close(loss, model(x, x)[1], atol=2e-2, rtol=0)


def test_compiler_sees_one_graph():
    """Complex numbers in the table must not break the graph; traced only, so no C++ compiler is needed."""
    model = tiny()
    x = ids(model)
    assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


# ---- the complex buffer and the tied matrix

CASTS = [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.double(),
    lambda m: m.to("cpu", torch.float16),
]


@pytest.mark.parametrize("cast", CASTS)
def test_pos_cis_stays_complex_under_casts(cast):
    model = tiny()
    before = model.pos_cis.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast(model)
    assert model.pos_cis.dtype == torch.complex64 and torch.equal(model.pos_cis, before)
    assert model.head.weight is model.embed.weight
    assert model(ids(model)).isfinite().all()


def test_meta_model_comes_back_whole():
    """to_empty leaves memory as it is: the table must be made anew and the matrix stay tied."""
    with torch.device("meta"):
        model = MiniGPT(tiny().config)
    assert model.pos_cis.is_meta
    model.to_empty(device="cpu")
    reference = tiny()
    assert torch.equal(model.pos_cis, reference.pos_cis)
    assert model.head.weight is model.embed.weight
    model.load_state_dict(reference.state_dict())
    assert torch.equal(model(ids(model)), reference(ids(model)))


def test_p11_the_only_complex_tensor_is_pos_cis_and_it_is_not_saved():
    """P11: what a DDP wrapper must leave out is known by name."""
    model = tiny()
    assert [n for n, b in model.named_buffers() if b.is_complex()] == ["pos_cis"]
    assert [n for n, _ in model.named_buffers()] == ["pos_cis"]
    assert not any(p.is_complex() for p in model.parameters())
    assert not any("pos_cis" in key for key in model.state_dict())


def test_state_survives_a_file_without_doubling_the_tied_matrix():
    model, file = tiny(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = tiny(seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(model(ids(model)), other(ids(model)))
    assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False))) - 1


# ---- generate

@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-300])
def test_g01_g02_temperature_zero_is_argmax(temperature):
    """G01, G02: 0 and nearly 0 take the most likely token, which is not token 0."""
    model = tiny().eval()
    x = ids(model, length=3)
    out = model.generate(x, 30, temperature=temperature)
    assert out.shape == (2, 33)
    for t in range(3, 33):
        assert torch.equal(out[:, t], model(out[:, max(0, t - 24):t])[:, -1].argmax(-1))
    assert (out[:, 3:] != 0).any()


@pytest.mark.parametrize("temperature", [-1, -1e-9, float("nan")])
def test_g01_negative_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature=.*must be 0"):
        tiny().generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=temperature)


def test_generate_runs_in_eval_mode_and_restores_each_module():
    model = tiny(drop_rate=0.5)
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    x = ids(model, length=3)
    assert torch.equal(model.generate(x, 8, 0), model.generate(x, 8, 0))
    assert modes == [m.training for m in model.modules()]
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[98]]), 1)
    assert modes == [m.training for m in model.modules()]


def test_generate_is_a_function_of_its_generator():
    model, x = tiny(), torch.zeros(1, 1, dtype=torch.long)
    draw = lambda seed: model.generate(x, 12, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


def test_generate_stops_at_eos_and_fills_the_rows_that_are_done():
    model, x = tiny(), torch.tensor([[1], [2], [3]])
    greedy = model.generate(x, 20, 0)
    eos = int(greedy[0, 3])
    out = model.generate(x, 20, 0, eos_id=eos)
    first = out[0].tolist().index(eos, 1)
    assert torch.equal(out[0, :first + 1], greedy[0, :first + 1]) and (out[0, first:] == eos).all()
    assert model.generate(x[:1], 20, 0, eos_id=eos).shape[1] == first + 1


def test_generate_refuses_an_empty_prompt():
    with pytest.raises(ValueError, match="at least one token"):
        tiny().generate(torch.zeros(1, 0, dtype=torch.long), 1)


def test_eval_mode_restores_after_an_error():
    model = tiny()
    with pytest.raises(RuntimeError), eval_mode(model):
        assert not model.training
        raise RuntimeError
    assert model.training


# ---- errors of the user

@pytest.mark.parametrize("fields, words", [
    (dict(emb_dim=100, n_heads=12), "n_heads=12 does not cut emb_dim=100 into heads of even width: choose 2 or 5 or 10"),
    (dict(emb_dim=12, n_heads=4), "n_heads=4 does not cut emb_dim=12 into heads of even width: choose 2 or 3 or 6"),
    (dict(emb_dim=15, n_heads=3), "emb_dim=15 is odd.*multiple of 6"),
    (dict(n_heads=12, n_kv_heads=5), "n_kv_heads=5 does not divide n_heads=12: choose"),
    (dict(n_layers=0), "n_layers=0 must be a whole number above 0"),
    (dict(vocab_size=2.0), "vocab_size=2.0 must be a whole number"),
    (dict(n_heads=True), "n_heads=True must be a whole number"),
    (dict(n_kv_heads=0), "n_kv_heads=0 must be"),
    (dict(drop_rate=1.0), "drop_rate=1.0"),
    (dict(drop_rate=-0.1), "drop_rate=-0.1"),
    (dict(drop_rate=float("nan")), "drop_rate=nan"),
    (dict(norm_eps=0.0), "norm_eps=0.0"),
    (dict(rope_theta=float("inf")), "rope_theta=inf"),
])
def test_impossible_configs_are_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        GPTConfig(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields, field", [
    (dict(emb_dim=100, n_heads=12), "n_heads"), (dict(emb_dim=12, n_heads=4), "n_heads"), (dict(n_heads=12, n_kv_heads=5), "n_kv_heads"),
])
def test_every_number_an_error_offers_is_accepted(fields, field):
    with pytest.raises(ValueError) as error:
        GPTConfig(**fields)
    for offer in str(error.value).split("choose ")[1].split(" or "):
        GPTConfig(**{**fields, field: int(offer)})


def test_too_long_input_is_one_line():
    with pytest.raises(ValueError, match=r"shape \(1, 25\).*context_length=24"):
        tiny()(torch.zeros(1, 25, dtype=torch.long))


# ---- the same weights in the reference library

@pytest.mark.parametrize("kv_heads", [4, 2])
def test_transformers_llama_with_the_same_weights_gives_the_same_logits(kv_heads):
    transformers = pytest.importorskip("transformers", reason="pip install transformers to compare with its Llama")
    model = tiny(n_kv_heads=kv_heads).eval()
    c = model.config
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.emb_dim, intermediate_size=c.hidden_dim, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=True, rope_theta=c.rope_theta)).eval()
    llama.load_state_dict(llama_state(model))
    x = ids(model)
    assert_close(model(x), llama(x).logits, atol=1e-5, rtol=1e-4)


def llama_state(model):
    """Our weights under the names of transformers' Llama."""
    c = model.config
    state = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attn.qkv.weight.split([c.n_heads * c.head_dim] + 2 * [c.n_kv_heads * c.head_dim])
        gate, up = block.ffn.gate_up.weight.chunk(2)
        names = {
            "input_layernorm": block.norm1.weight, "post_attention_layernorm": block.norm2.weight,
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": block.attn.out.weight,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": block.ffn.down.weight,
        }
        state |= {f"model.layers.{i}.{name}.weight": weight for name, weight in names.items()}
    return {name: weight.detach() for name, weight in state.items()}
