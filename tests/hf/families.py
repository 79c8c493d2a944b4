"""Families of Hugging Face Transformers: small configurations with random weights, since no hub is asked for any.

Of each: a model that gives a loss, a batch for it, which inputs have a length that may vary, and whether it exports.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
VOCABULARY = {"vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one is built, and what it takes."""

    kind: str
    model: str
    config: str
    options: dict[str, Any]
    batch: str
    varying: dict[str, dict[int, str]] = field(default_factory=dict)
    exports: bool = True
    why: str = ""

    def build(self):
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).eval()

    def inputs(self):
        """A batch without labels."""
        return BATCHES[self.batch]()

    def labelled(self):
        """The same with what a loss needs."""
        batch = self.inputs()
        if self.batch in ("image", "wave classes"):
            labels = torch.tensor([0, 1])
        elif self.batch == "two texts":
            labels = batch["decoder_input_ids"].clone()
        elif self.batch in ("wave",):
            labels = torch.tensor([[3, 4], [5, 6]])
        elif self.batch in ("mel and text",):
            labels = batch["decoder_input_ids"].clone()
        else:
            labels = (
                batch["input_ids"].clone() if self.kind == "decoder" or "Masked" in self.model else torch.tensor([0, 1])
            )
        return {**batch, "labels": labels}


def _text(length=9):
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


BATCHES = {
    "text": _text,
    "two texts": lambda: {**_text(), "decoder_input_ids": _text(6)["input_ids"]},
    "image": lambda: {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))},
    "wave": lambda: {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(1))},
    "wave classes": lambda: {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(1))},
    "mel and text": lambda: {
        "input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1)),
        "decoder_input_ids": _text(6)["input_ids"],
    },
}

LENGTH = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}
BOTH = {**LENGTH, "decoder_input_ids": {1: "written"}}
WAVE = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
SEQ2SEQ = {
    **VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}

FAMILIES = {
    # Encoders
    "bert": Family(
        kind="encoder",
        model="BertForSequenceClassification",
        config="BertConfig",
        options={**SMALL, **VOCABULARY},
        batch="text",
        varying=LENGTH,
    ),
    "roberta": Family(
        kind="encoder",
        model="RobertaForMaskedLM",
        config="RobertaConfig",
        options={**SMALL, **VOCABULARY},
        batch="text",
        varying=LENGTH,
    ),
    "distilbert": Family(
        kind="encoder",
        model="DistilBertForSequenceClassification",
        config="DistilBertConfig",
        options={
            "dim": 32,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 48,
            "vocab_size": 50,
            "max_position_embeddings": 32,
        },
        batch="text",
        varying=LENGTH,
    ),
    "electra": Family(
        kind="encoder",
        model="ElectraForSequenceClassification",
        config="ElectraConfig",
        options={**SMALL, **VOCABULARY, "embedding_size": 16},
        batch="text",
        varying=LENGTH,
    ),
    "albert": Family(
        kind="encoder",
        model="AlbertForSequenceClassification",
        config="AlbertConfig",
        options={**SMALL, **VOCABULARY, "embedding_size": 16, "num_hidden_layers": 2},
        batch="text",
        varying=LENGTH,
    ),
    "deberta-v2": Family(
        kind="encoder",
        model="DebertaV2ForSequenceClassification",
        config="DebertaV2Config",
        options={
            **SMALL,
            **VOCABULARY,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "max_relative_positions": 16,
        },
        batch="text",
        varying=LENGTH,
    ),
    "modernbert": Family(
        kind="encoder",
        model="ModernBertForSequenceClassification",
        config="ModernBertConfig",
        options={**SMALL, **VOCABULARY, "num_hidden_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        batch="text",
        varying=LENGTH,
    ),
    # Decoders
    "gpt2": Family(
        kind="decoder",
        model="GPT2LMHeadModel",
        config="GPT2Config",
        options={
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 32,
            "vocab_size": 50,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        batch="text",
        varying=LENGTH,
    ),
    "llama": Family(
        kind="decoder",
        model="LlamaForCausalLM",
        config="LlamaConfig",
        options={**SMALL, **VOCABULARY},
        batch="text",
        varying=LENGTH,
    ),
    "mistral": Family(
        kind="decoder",
        model="MistralForCausalLM",
        config="MistralConfig",
        options={**SMALL, **VOCABULARY, "num_key_value_heads": 1, "sliding_window": 16},
        batch="text",
        varying=LENGTH,
    ),
    "qwen2": Family(
        kind="decoder",
        model="Qwen2ForCausalLM",
        config="Qwen2Config",
        options={**SMALL, **VOCABULARY, "num_key_value_heads": 1},
        batch="text",
        varying=LENGTH,
    ),
    "gemma": Family(
        kind="decoder",
        model="GemmaForCausalLM",
        config="GemmaConfig",
        options={**SMALL, **VOCABULARY, "num_key_value_heads": 1, "head_dim": 16},
        batch="text",
        varying=LENGTH,
    ),
    "opt": Family(
        kind="decoder",
        model="OPTForCausalLM",
        config="OPTConfig",
        options={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            **VOCABULARY,
        },
        batch="text",
        varying=LENGTH,
    ),
    "gpt-neox": Family(
        kind="decoder",
        model="GPTNeoXForCausalLM",
        config="GPTNeoXConfig",
        options={**SMALL, **VOCABULARY},
        batch="text",
        varying=LENGTH,
    ),
    "bloom": Family(
        kind="decoder",
        model="BloomForCausalLM",
        config="BloomConfig",
        options={
            "hidden_size": 32,
            "n_layer": 1,
            "n_head": 2,
            "vocab_size": 50,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        batch="text",
        varying=LENGTH,
    ),
    # Encoder and decoder
    "t5": Family(
        kind="both",
        model="T5ForConditionalGeneration",
        config="T5Config",
        options={
            "vocab_size": 50,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        batch="two texts",
        varying=BOTH,
    ),
    "bart": Family(
        kind="both",
        model="BartForConditionalGeneration",
        config="BartConfig",
        options=SEQ2SEQ,
        batch="two texts",
        varying=BOTH,
    ),
    "marian": Family(
        kind="both", model="MarianMTModel", config="MarianConfig", options=SEQ2SEQ, batch="two texts", varying=BOTH
    ),
    # Vision
    "vit": Family(
        kind="vision", model="ViTForImageClassification", config="ViTConfig", options={**SMALL, **IMAGE}, batch="image"
    ),
    "deit": Family(
        kind="vision",
        model="DeiTForImageClassification",
        config="DeiTConfig",
        options={**SMALL, **IMAGE},
        batch="image",
    ),
    "swin": Family(
        kind="vision",
        model="SwinForImageClassification",
        config="SwinConfig",
        options={
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        batch="image",
    ),
    "convnext": Family(
        kind="vision",
        model="ConvNextForImageClassification",
        config="ConvNextConfig",
        options={"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 32},
        batch="image",
    ),
    "segformer": Family(
        kind="vision",
        model="SegformerForImageClassification",
        config="SegformerConfig",
        options={
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        batch="image",
    ),
    # Audio
    "wav2vec2": Family(
        kind="audio",
        model="Wav2Vec2ForCTC",
        config="Wav2Vec2Config",
        options={**SMALL, **WAVE, "vocab_size": 20, "mask_time_prob": 0.0, "ctc_zero_infinity": True},
        batch="wave",
    ),
    "hubert": Family(
        kind="audio",
        model="HubertForSequenceClassification",
        config="HubertConfig",
        options={**SMALL, **WAVE, "mask_time_prob": 0.0},
        batch="wave classes",
    ),
    "whisper": Family(
        kind="both",
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        options={**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        batch="mel and text",
    ),
}
