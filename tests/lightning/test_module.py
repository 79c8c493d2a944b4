"""JointModule against Lightning itself: the same weights as a loop written by hand, and as a run that went on."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.elastic import ElasticOptions

lightning = pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
from decomposable.lightning import JointModule  # noqa: E402
from decomposable_edge.errors import InvalidArgumentError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(1))
JOINT = {"joint": {"ratio": (0.1, 0.5), "seed": 5}}
ELASTIC = {"elastic": {"options": ElasticOptions(macs=(0.3, 0.9), refresh=3, smallest_share=0.2), "seed": 5}}
SCRATCH = {"elastic": {"from_scratch": True, "seed": 5}}


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))


class Small(JointModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(shuffle=False):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8, shuffle=shuffle)


def trainer(folder, epochs, **options):
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


@pytest.mark.parametrize("options", [JOINT, ELASTIC, SCRATCH], ids=["joint", "elastic", "from scratch"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_the_loop_by_hand(options, precision, tmp_path):
    module = Small(build(), **options, clip_norm=0.5, accumulate=2)
    torch.manual_seed(7)
    trainer(tmp_path, 2, precision=precision, enable_checkpointing=False).fit(module, loader())

    model = build().train()
    if "joint" in options:
        joint = dn.JointObjective(model, **options["joint"])
    else:
        joint = dn.Elastic(model, example_input=X[:2], steps=10, **options["elastic"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(7)
    for _ in range(2):
        batches = list(loader())
        for group in (batches[:2], batches[2:4], batches[4:]):
            optimizer.zero_grad()
            for x, y in group:

                def run(net, x=x):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                        return net(x)

                def loss(out, y=y):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                        return F.cross_entropy(out, y)

                joint.backward(forward=run, loss=loss, weight=1 / len(group))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    for own, expected in zip(module.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("options", [JOINT, ELASTIC, SCRATCH], ids=["joint", "elastic", "from scratch"])
def test_a_resumed_run_repeats_exactly(options, tmp_path):
    if "elastic" in options:
        options = {"elastic": {**options["elastic"], "steps": 20}}  # of the whole training, which the first part is not

    def run(folder, epochs, checkpoint=None):
        torch.manual_seed(7)
        module = Small(build(), **options, clip_norm=0.5, accumulate=2)
        made = trainer(folder, epochs)
        made.fit(module, loader(shuffle=True), ckpt_path=checkpoint)
        made.save_checkpoint(folder / "last.ckpt")
        return module.model

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "part", 2)
    torch.manual_seed(99)
    resumed = run(tmp_path / "part", 4, tmp_path / "part" / "last.ckpt")
    for own, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_what_it_cannot_do_is_refused():
    for options in ({"clip_norm": 0}, {"accumulate": 0}):
        with pytest.raises(InvalidArgumentError) as caught:
            Small(build(), **options)
        assert {caught.value.option: caught.value.came} == options
    with pytest.raises(InvalidArgumentError) as caught:
        Small(build()).on_load_checkpoint({})
    assert caught.value.option == "checkpoint"


def test_names_stay(tmp_path):
    module = Small(build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path, 1, enable_checkpointing=False).fit(module, loader())
    assert list(module.state_dict()) == [f"model.{name}" for name in build().state_dict()]


def test_clipping_with_a_scaler(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    scaled = Small(build(), joint={"ratio": (0.1, 0.5), "seed": 5}, clip_norm=0.01)
    norms = []
    step = scaled.on_before_optimizer_step

    def note(optimizer):
        step(optimizer)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in scaled.model.parameters()])))

    scaled.on_before_optimizer_step = note
    trainer(tmp_path, 1, plugins=[precision], enable_checkpointing=False).fit(scaled, loader())
    assert len(norms) == 5
    assert max(norms) <= 0.0101


def test_a_loader_without_a_length_has_its_last_step(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    stream = torch.utils.data.DataLoader(Stream(), batch_size=8)
    models = []
    for each in (loader(), stream):
        module = Small(build(), joint={"ratio": (0.1, 0.5), "seed": 5}, accumulate=2)
        torch.manual_seed(7)
        fitting = trainer(tmp_path, 1, enable_checkpointing=False)
        fitting.fit(module, each)
        assert fitting.global_step == 3
        models.append(module.model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_schedule_that_waits_for_a_metric_is_refused_at_the_start(tmp_path):
    class Waiting(JointModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss"}}

    module = Waiting(build(), joint={"ratio": (0.1, 0.5)})
    with pytest.raises(InvalidArgumentError) as caught:
        trainer(tmp_path, 1, enable_checkpointing=False).fit(module, loader())
    assert (caught.value.option, caught.value.came) == ("configure_optimizers", "ReduceLROnPlateau")
    assert all(torch.equal(a, b) for a, b in zip(module.model.parameters(), build().parameters(), strict=True))


def test_weights_are_loaded_for_evaluation_without_the_options_of_training(tmp_path):
    module = Small(build(), **ELASTIC)
    fitting = trainer(tmp_path, 1)
    fitting.fit(module, loader())
    model, before = build(), torch.get_rng_state()
    loaded = Small.load_from_checkpoint(fitting.checkpoint_callback.best_model_path, model=model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(module.model.parameters(), loaded.model.parameters(), strict=True))
