"""TRL's GRPO with its loss as a function of each token's values: three matrix products of the head instead of four.

    python examples/trl_grpo_row_loss.py       on a CPU, in less than a minute, with a tiny model made on the spot

TRL asks the model for log-probabilities and makes its loss of them, whose gradient arrives when they are long computed.
Here the model makes the loss: its forward takes the function and, as arguments, the tensors that belong to tokens, so
that the hooks of DDP, FSDP and ZeRO-3 fire as for any forward. TRL's own _compute_loss does the rest, what it logs
included, with log-probabilities and entropies that are detached.

A loss that needs a sequence's or a batch's values together is no function of a token's: those options are refused by
name (`enable()` is for them: TRL's trainer as it is, with four products).
"""

from __future__ import annotations

import functools
import types

import datasets
import torch
import transformers
import trl
from torch.distributed.tensor import DTensor
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from liger_cutedsl import fused_linear_loss
from trl_sft_and_grpo import NUMBERS, counts_up, logged, settings, tiny_llama, tokenizer

# option → (whether a setting of it is a matter of single tokens, why not)
ROW_LOCAL = {
    "importance_sampling_level": (lambda value: value == "token", "a ratio of sequences is of all of their tokens"),
    "loss_type": (
        lambda value: value in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"),
        "VESPO weighs a token by its whole sequence, and others are not known here",
    ),
    "off_policy_mask_threshold": (lambda value: value is None, "the off-policy mask asks for a sequence's mean KL"),
    "top_entropy_quantile": (lambda value: value >= 1.0, "a quantile of entropies is of all of the batch's tokens"),
    "cast_lm_head_to_fp32": (lambda value: not value, "this example multiplies in the dtype of the hidden states"),
}


def refuse_what_is_not_row_local(args: trl.GRPOConfig) -> None:
    for name, (accepted, why) in ROW_LOCAL.items():
        if not accepted(getattr(args, name)):
            raise ValueError(f"{name}={getattr(args, name)!r} is not for a loss of single tokens: {why}")


def row_loss_of(trainer: trl.GRPOTrainer):
    """TRL's per-token loss (GRPOTrainer._compute_loss), by the trainer's options.

    advantage, weight: of each token.  old, reference: log-probabilities, or 0.0 where TRL has none.  ratio: of the
    importance of what another engine sampled.  entropy_weight: of the entropy bonus, or 0.0.
    """
    kind, args, beta = trainer.loss_type, trainer.args, trainer.beta
    low, high = trainer.epsilon_low, trainer.epsilon_high
    corrected, delta = args.use_bias_correction_kl, float("inf") if args.delta is None else args.delta
    positive, negative = args.sapo_temperature_pos, args.sapo_temperature_neg

    def row_loss(values, advantage, weight, old, reference, ratio, entropy_weight):
        log_p = values.log_prob
        change = torch.exp(log_p - (old if isinstance(old, torch.Tensor) else log_p.detach()))
        if kind == "cispo":
            loss = -change.clamp(max=high).detach() * advantage * log_p
        elif kind == "sapo":
            slope = torch.where(advantage > 0, positive, negative)
            loss = -torch.sigmoid(slope * (change - 1)) * 4 / slope * advantage
        else:
            clipped = change.clamp(1 - low, 1 + high) * advantage
            loss = -torch.min(change.clamp(max=delta) * advantage, clipped)
        loss = loss * ratio
        if isinstance(reference, torch.Tensor):
            kl = torch.exp(reference - log_p) - (reference - log_p) - 1
            loss = loss + beta * (kl * change if corrected else kl)
        loss = loss * weight
        return loss - entropy_weight * values.entropy if isinstance(entropy_weight, torch.Tensor) else loss

    return row_loss


def add_row_loss_head(model, temperature: float) -> None:
    """Of a model that TRL has given its fused head: model(…, labels=labels, fused_lm_head=True, row_loss=f,
    row_tensors=…) returns the sum of f's losses over the last tokens of each sequence, of which the tensors (B, T) are,
    with their log-probabilities and entropies, detached. What else it is called for it does as before."""
    without_row_loss, config = model.forward, model.config.get_text_config()
    for name in ("output_multiplier", "lm_head_multiplier", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"this example knows no {name} of logits, and the model's is {getattr(config, name)}")
    scale = getattr(config, "logit_scale", None)
    logits = dict(
        temperature=temperature,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=1.0 if scale is None else scale,
    )

    @functools.wraps(type(model).forward)
    def forward(self, *args, row_loss=None, row_tensors=(), **kwargs):
        if row_loss is None:
            return without_row_loss(*args, **kwargs)
        labels, _ = kwargs.pop("labels"), kwargs.pop("fused_lm_head")
        found = self.base_model(*args, **kwargs, use_cache=False)
        count, head = row_tensors[0].shape[1], self.get_output_embeddings()
        hidden, labels = found.last_hidden_state[:, -count - 1 : -1], labels[:, -count:]
        if isinstance(head.weight, DTensor):  # its ranks have rows of their own: no vocabulary split over ranks
            raise RuntimeError(
                "lm_head is an FSDP group of its own, whose gradient would be lost: leave it to the root"
            )
        with maybe_gather_lm_head_ctx(head.weight, head.bias):
            scored = fused_linear_loss(
                hidden,
                head.weight,
                labels,
                row_loss,
                *row_tensors,
                reduction="sum",
                bias=head.bias,
                return_log_probs=True,
                return_entropy=True,
                **logits,
            )
        return FusedCausalLMOutput(loss=scored.loss, log_probs=scored.log_probs, entropy=scored.entropy)

    model.forward = types.MethodType(forward, model)


class RowLossGRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer, whose loss and its gradients come out of the model's forward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        refuse_what_is_not_row_local(self.args)
        if self.aux_loss_enabled:
            raise ValueError("this example has no auxiliary loss of a mixture of experts: set router_aux_loss_coef=0.0")
        self.row_loss = row_loss_of(self)
        plain = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        add_row_loss_head(plain, self.temperature)

    def _compute_loss(self, model, inputs):
        counted = inputs["completion_mask"]
        counted = counted * inputs["tool_mask"] if "tool_mask" in inputs else counted
        rows, outputs = self._rows(inputs, counted), []

        def scored(**model_inputs):
            labels = model_inputs.pop("labels")
            labels[:, -counted.shape[1] :].masked_fill_(counted == 0, -100)
            outputs.append(model(**model_inputs, labels=labels, row_loss=self.row_loss, row_tensors=rows))
            return outputs[-1]

        super()._compute_loss(scored, inputs)  # which calls scored() with the model's inputs, and logs
        return outputs[-1].loss

    def _rows(self, inputs, counted) -> tuple:
        """What row_loss takes of each token, (B, T) each, or a number for all."""
        advantage = inputs["advantages"]
        advantage = (advantage[:, None] if advantage.dim() == 1 else advantage).expand(counted.shape)
        ratio = inputs["importance_sampling_ratio"].expand(counted.shape) if self._corrects_sampling else 1.0
        old, reference = inputs.get("old_per_token_logps", 0.0), inputs["ref_per_token_logps"] if self.beta else 0.0
        return advantage, self._weight(inputs, counted), old, reference, ratio, self._entropy_weight(counted)

    @property
    def _corrects_sampling(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _steps(self) -> float:
        """What the losses of an accumulation are divided by; in eval there is none."""
        return self.current_gradient_accumulation_steps if self.model.training else 1.0

    def _weight(self, inputs, counted) -> torch.Tensor:
        """Each token's share of the loss, by loss_type: TRL's divisors."""
        sequences, per_sequence = counted.shape[0], counted.sum(dim=1, keepdim=True).clamp(min=1.0)
        if self.loss_type in ("grpo", "sapo"):
            return counted / (per_sequence * sequences * self._steps)
        if self.loss_type == "bnpo":
            return counted / (counted.sum().clamp(min=1.0) * self._steps)
        if self.loss_type == "dr_grpo":
            return counted / (sequences * self.max_completion_length * self._steps)
        if self.loss_type == "luspo":
            return counted / (sequences * self._steps)
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes  # cispo, dapo
        if self.model.training:
            items = items * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return counted / items

    def _entropy_weight(self, counted) -> torch.Tensor | float:
        adaptive = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        if not self._entropy_bonus_enabled or adaptive:
            return 0.0
        return self.entropy_coef * counted / (counted.sum().clamp(min=1.0) * self._steps)


def main() -> None:
    words = tokenizer()
    prompts = datasets.Dataset.from_dict({"prompt": NUMBERS[:8] * 4})
    arguments = settings(
        trl.GRPOConfig,
        max_steps=60,
        max_completion_length=5,
        num_generations=8,
        temperature=1.2,
        entropy_coef=0.001,
    )
    model = tiny_llama(len(words))
    trainer = RowLossGRPOTrainer(model, counts_up, args=arguments, train_dataset=prompts, processing_class=words)
    logged(trainer, "reward", "entropy", "loss")


if __name__ == "__main__":
    transformers.set_seed(0)
    main()
