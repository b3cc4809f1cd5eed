"""Contenders from packages, plain and in the settings that serve them best: models of transformers and litgpt, loops of transformers and lightning."""
import tempfile
import threading
import warnings

import torch

from minigpt.pretrainer_single import build_optimizer
from minigpt.speed import fused_attention

from .contenders import FASTER, PlainLoop, Runner, contender, cross_entropy
from .work import CLIP, LEARNING_RATE, SEED, WEIGHT_DECAY, Work


class Stopped(BaseException):
    "Ends a loop that is not ours from within its callback"


class HostedLoop(Runner):
    "A loop that belongs to a package: it runs in a thread of its own and waits in its callback until the next step is asked for"

    def __init__(self, *args):
        super().__init__(*args)
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        self.closing, self.error = False, None
        threading.Thread(target=self.host, daemon=True).start()

    def host(self):
        "The thread: their loop, from the first step asked for to the end"
        try:
            self.wait_for_turn()
            self.run()
        except Stopped:
            pass
        except BaseException as error:  # told to whoever waits for the step
            self.error = error
        self.answered.release()

    def wait_for_turn(self):
        "Until somebody asks for a step"
        self.asked.acquire()
        if self.closing:
            raise Stopped

    def step_ended(self):
        "Called by their loop after each update"
        self.done += 1
        self.answered.release()
        self.wait_for_turn()

    def step(self):
        "One update of their loop, with all that it does around it"
        self.asked.release()
        self.answered.acquire()
        if self.error:
            raise self.error

    def close(self):
        "End their loop"
        self.closing = True
        self.asked.release()
        self.answered.acquire()


# ---- models


def attention(work: Work) -> str:
    "The faster one's name in transformers, by the rule that our own contenders follow"
    return "sdpa" if fused_attention(work.device, work.config.context_length) else "eager"


def llama(work: Work) -> torch.nn.Module:
    "LlamaForCausalLM of our shape: same widths, same number of weights"
    from transformers import LlamaConfig, LlamaForCausalLM

    c = work.config
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.emb_dim, intermediate_size=c.hidden_dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        max_position_embeddings=c.context_length, rms_norm_eps=c.norm_eps, tie_word_embeddings=True, use_cache=False, attn_implementation=attention(work),
    ))  # fmt: skip


def gpt2(work: Work) -> torch.nn.Module:
    "GPT2LMHeadModel of our layers, width and heads; learned positions, biases and a feed-forward of four widths are its own"
    from transformers import GPT2Config, GPT2LMHeadModel

    c = work.config
    torch.manual_seed(SEED)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=c.vocab_size, n_embd=c.emb_dim, n_layer=c.n_layers, n_head=c.n_heads, n_positions=c.context_length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation=attention(work),
    ))  # fmt: skip


def lit_gpt(work: Work) -> torch.nn.Module:
    "GPT of litgpt in its Llama form and our shape"
    from litgpt import GPT, Config

    c = work.config
    torch.manual_seed(SEED)
    model = GPT(Config(
        block_size=c.context_length, n_layer=c.n_layers, n_embd=c.emb_dim, n_head=c.n_heads, padded_vocab_size=c.vocab_size, vocab_size=c.vocab_size,
        intermediate_size=c.hidden_dim, norm_class_name="RMSNorm", norm_eps=c.norm_eps, mlp_class_name="LLaMAMLP", parallel_residual=False,
        rotary_percentage=1.0, bias=False,
    ))  # fmt: skip
    for weight in model.parameters():  # it leaves PyTorch's own start; its pretraining script sets this one
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    model.transformer.wte.weight = model.lm_head.weight
    return model


def logits(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    "Of a model of transformers"
    return model(input_ids=x).logits


# ---- plain loops


SETTINGS = dict(optimizer="AdamW, fused", dropout=0.0)


def transformers_loop(name: str, make, dtype: str = "bfloat16", compiled: bool = False):
    "A model of transformers in a plain loop"

    @contender(f"transformers {name}", "transformers", dtype=dtype, attention=FASTER, compiled=compiled, loop="plain", **SETTINGS)
    def build(work):
        return PlainLoop(work, make(work), logits, dtype, compiled)


transformers_loop("Llama, fp32", llama, dtype="float32")
transformers_loop("Llama, bf16", llama)
transformers_loop("Llama, bf16, compiled", llama, compiled=True)
transformers_loop("GPT-2, bf16, compiled", gpt2, compiled=True)


def litgpt_loop(name: str, compiled: bool):
    "litgpt's model in a plain loop"

    @contender(f"litgpt {name}", "litgpt", dtype="bfloat16", attention="sdpa", compiled=compiled, loop="plain", **SETTINGS)
    def build(work):
        return PlainLoop(work, lit_gpt(work), dtype="bfloat16", compiled=compiled)


litgpt_loop("GPT, bf16", compiled=False)
litgpt_loop("GPT, bf16, compiled", compiled=True)


# ---- loops of packages


class TransformersTrainer(HostedLoop):
    "`transformers.Trainer` on a Llama"

    forward = staticmethod(logits)

    def run(self):
        "Its loop, with all that only watches switched off"
        import transformers

        work, step_ended = self.work, self.step_ended

        class OneByOne(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                step_ended()

        class InOurOrder(transformers.Trainer):
            def get_train_dataloader(self):
                batches = (work.train_batch(step) for step in range(1_000_000))
                return ForEver(dict(input_ids=x, labels=y, shift_labels=y) for x, y in batches)

        with tempfile.TemporaryDirectory() as folder:
            args = transformers.TrainingArguments(
                folder, max_steps=1_000_000, per_device_train_batch_size=work.batch, bf16=True, use_cpu=work.device == "cpu", torch_compile=True,
                optim="adamw_torch_fused", learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=WEIGHT_DECAY, adam_beta2=0.95, max_grad_norm=CLIP,
                logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, seed=SEED, dataloader_pin_memory=False,
            )  # fmt: skip
            InOurOrder(self.model, args, callbacks=[OneByOne()]).train()


class ForEver(torch.utils.data.IterableDataset):
    "Batches as they come"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class LightningTrainer(HostedLoop):
    "`lightning.Trainer` on litgpt's model"

    def run(self):
        "Its loop, with all that only watches switched off"
        import lightning

        work, step_ended = self.work, self.step_ended
        model = self.model

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = model
                self.loss_of = torch.compile(lambda x, y: cross_entropy(model(x), y))

            def training_step(self, batch, number):
                return self.loss_of(*batch)

            def configure_optimizers(self):
                return build_optimizer(self, LEARNING_RATE, WEIGHT_DECAY)

            def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
                torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)  # lightning's own refuses a fused optimizer

            def on_train_batch_end(self, *args):
                step_ended()

        warnings.filterwarnings("ignore", module="lightning")
        trainer = lightning.Trainer(
            accelerator=work.device.replace("cuda", "gpu"), devices=1, precision="bf16-mixed", max_steps=-1, max_epochs=-1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), ForEver(work.train_batch(step) for step in range(1_000_000)))


HOSTED = SETTINGS | dict(dtype="bfloat16", compiled=True)


@contender("transformers.Trainer, Llama, bf16, compiled", "transformers", "accelerate", attention=FASTER, loop="transformers.Trainer", **HOSTED)
def transformers_trainer(work):
    return TransformersTrainer(work, llama(work), "bfloat16")


@contender("lightning.Trainer, litgpt GPT, bf16, compiled", "lightning", "litgpt", attention="sdpa", loop="lightning.Trainer", **HOSTED)
def lightning_trainer(work):
    return LightningTrainer(work, lit_gpt(work), "bfloat16")
