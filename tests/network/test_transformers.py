"""Models of the transformers library, where it is installed: small, with random weights."""

import warnings

import pytest
import torch

import decomposable as dn
from refusals import Saying, refused

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8}
IDS = {"input_ids": torch.arange(18).view(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}


def mobilenet():
    config = transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=32)
    return transformers.MobileNetV2Model(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def t5():
    config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return transformers.T5Model(config), {**IDS, "decoder_input_ids": IDS["input_ids"][:, :4]}


def clip():
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 49, "bos_token_id": 48}
    config = transformers.CLIPConfig(text_config=text, vision_config={**SMALL, **IMAGE}, projection_dim=16)
    return transformers.CLIPModel(config), {**IDS, "pixel_values": torch.randn(2, 3, 32, 32)}


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, **IMAGE)), {"pixel_values": torch.randn(2, 3, 32, 32)}


def call(net, batch):
    outputs = net(**batch)
    return next(value for value in outputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point())


@pytest.mark.parametrize("make", [mobilenet, t5, clip, vit])
def test_it_runs_at_every_size_and_extracted(make):
    torch.manual_seed(0)
    model, batch = make()
    net = dn.decompose(model, batch, forward=call)
    assert not any("two factors in its place" in reason for reason in net.skipped.values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MobileNetV2 is not calibrated
        torch.testing.assert_close(call(net, batch), call(model.eval(), batch))
        for size in (0.9, 0.6, 0.4, 0.3, net.selector.smallest_size):
            net.resize_(macs=size)
            torch.testing.assert_close(call(net.extract(), batch), call(net, batch))


def test_a_missing_forward_says_so():
    model, batch = t5()
    came = Saying("^a dict of input_ids, attention_mask, decoder")
    with refused("example_input", came, "forward=lambda net, batch: net(**batch)"):
        dn.decompose(model, batch)
