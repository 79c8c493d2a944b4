"""JointTrainer against the Trainer itself: the same weights as a loop written by hand, and as a run that went on."""

import pytest
import torch

import decomposable as dn
from decomposable.elastic import ElasticOptions

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")
from families import FAMILIES  # noqa: E402

from decomposable.hf import JointTrainer  # noqa: E402
from decomposable.training.state_file import read_state  # noqa: E402
from decomposable_edge.errors import ArtifactError, InvalidArgumentError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ELASTIC = {"options": ElasticOptions(macs=(0.3, 0.9), refresh=3, smallest_share=0.2)}


class Texts(torch.utils.data.Dataset):
    def __init__(self, count=12, length=9):
        self.ids = torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: index % 4] = -100  # of unequal counts, as padding makes them
        return {"input_ids": self.ids[index], "labels": labels}


def trainer(folder, *, joint=None, elastic=None, kind=JointTrainer, model=None, **options):
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        num_train_epochs=options.pop("epochs", 2),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )
    given = {"joint": joint, "elastic": elastic} if issubclass(kind, JointTrainer) else {}
    return kind(model=model or FAMILIES["gpt2"].build(), args=args, train_dataset=Texts(), **given)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_balance_0_is_the_trainer_itself(tmp_path):
    own = trainer(tmp_path, joint={"balance": 0.0}, epochs=1)
    loss = own.train().training_loss
    plain = trainer(tmp_path, joint=None, kind=transformers.Trainer, epochs=1)
    assert loss == pytest.approx(plain.train().training_loss, rel=1e-6)
    for one, other in zip(weights(own.model), weights(plain.model), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bf16", [False, True])
def test_it_is_the_loop_by_hand(bf16, tmp_path):
    made = trainer(
        tmp_path, joint={"ratio": (0.1, 0.5), "seed": 5}, bf16=bf16, optim="sgd", lr_scheduler_type="constant"
    )
    made.train()

    torch.manual_seed(0)
    model = FAMILIES["gpt2"].build().train()
    joint = dn.JointObjective(model, ratio=(0.1, 0.5), seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    transformers.set_seed(42)
    reference = trainer(tmp_path, joint=None, kind=transformers.Trainer, model=model)
    for epoch in range(2):
        loader = reference.get_train_dataloader()
        getattr(loader, "set_epoch", lambda _: None)(epoch)
        batches = list(loader)
        for group in zip(batches[::2], batches[1::2], strict=True):
            count = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
            optimizer.zero_grad()
            for batch in group:

                def closure(net, batch=batch, count=count):
                    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                        return net(**batch, num_items_in_batch=count).loss.float()

                joint.backward(closure)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for one, other in zip(weights(made.model), weights(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if bf16 else 1e-5, atol=1e-4 if bf16 else 1e-6)


def test_the_usual_distance_is_the_divergence_where_there_is_a_label_for_the_next_token(tmp_path):
    class Mine(transformers.GPT2LMHeadModel):
        """A subclass is a causal model, too."""

    torch.manual_seed(0)
    for model in (FAMILIES["gpt2"].build(), Mine(FAMILIES["gpt2"].build().config), FAMILIES["bert"].build()):
        made = trainer(tmp_path, model=model)
        low, full = torch.randn(2, 3, 5, 7)
        labels = torch.tensor([[1, 2, -100, 4, 5], [1, -100, 3, 4, 5], [-100, 2, 3, -100, -100]])
        made._labels = labels
        is_causal = isinstance(model, transformers.GPT2LMHeadModel)
        total, count = 0.0, 0
        for row in range(3):
            for place in range(5):
                at = place + 1 if is_causal else place
                if at < 5 and labels[row, at] != -100:
                    p, q = full[row, place].softmax(0), low[row, place].softmax(0)
                    total, count = total + float((p * (p / q).log()).sum()), count + 1
        outputs = [transformers.utils.ModelOutput(logits=each) for each in (low, full)]
        assert float(made._kl_at_labels(*outputs)) == pytest.approx(total / count, rel=1e-5)


JOINT = {"joint": {"ratio": (0.1, 0.5), "refresh": 3}}
SCRATCH = {"elastic": {"from_scratch": True}}


@pytest.mark.parametrize(
    ("options", "bf16"),
    [
        pytest.param(JOINT, False, id="joint", marks=pytest.mark.slow),
        pytest.param(JOINT, True, id="joint bf16"),
        pytest.param({"elastic": ELASTIC}, False, id="elastic"),
        pytest.param(SCRATCH, False, id="from scratch"),
        pytest.param({"elastic": ELASTIC}, True, id="elastic bf16", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_repeats_exactly(options, bf16, tmp_path):
    step = 2 if bf16 else 3  # in the middle of an epoch, and at its end
    whole = trainer(tmp_path / "whole", **options, bf16=bf16, save_strategy="steps", save_steps=step)
    whole.train()
    torch.manual_seed(99)
    resumed = trainer(tmp_path / "again", **options, bf16=bf16)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    for one, other in zip(weights(resumed.model), weights(whole.model), strict=True):
        assert torch.equal(one, other)
    assert read_state(tmp_path / "whole" / f"checkpoint-{step}" / "joint.safetensors")


def test_it_takes_no_batch_before_the_training_logs_both_losses_and_sizes_and_keeps_names(tmp_path):
    class Counted(Texts):
        taken = 0

        def __getitem__(self, index):
            Counted.taken += 1
            return super().__getitem__(index)

    made = trainer(tmp_path, elastic=ELASTIC)
    made.train_dataset = Counted()
    assert Counted.taken == 0
    made.train()
    assert made.objective.networks.sizes.selector.fixed_macs is not None
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    full, low = ([entry[name] for entry in logged if name in entry] for name in ("loss_full", "loss_low"))
    assert all(1 < each < 5 for each in [*full, *low])
    assert len(full) + len(low) > len(logged)  # of two batches one may be the full network's
    assert all(0.2 < entry["macs"] <= 0.9 for entry in logged if "macs" in entry)
    assert list(made.model.state_dict()) == list(FAMILIES["gpt2"].build().state_dict())
    assert made.evaluate(Texts(4))["eval_loss"] > 0


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    plain = trainer(tmp_path, joint=None, kind=transformers.Trainer, save_strategy="steps", save_steps=3, epochs=1)
    plain.train()
    with pytest.raises(ArtifactError, match=r"joint\.safetensors"):
        trainer(tmp_path, joint={}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_options_are_checked(tmp_path):
    with pytest.raises(InvalidArgumentError, match="elastic and joint: got both"):
        trainer(tmp_path, joint={}, elastic={})
    with pytest.raises(InvalidArgumentError, match="balance"):
        trainer(tmp_path, joint={"balance": 2})


def test_with_model_init_the_model_that_is_trained_is_the_one_that_is_kept(tmp_path):
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True
    )
    own = JointTrainer(model_init=FAMILIES["gpt2"].build, args=args, train_dataset=Texts(), joint={"ratio": (0.2, 0.5)})
    own.train()
    assert own.objective.model is own.model
    start = weights(FAMILIES["gpt2"].build())
    assert any(not torch.equal(one, other) for one, other in zip(weights(own.model), start, strict=True))


def test_after_bf16_the_model_computes_in_its_own_precision(tmp_path):
    own = trainer(tmp_path, joint={"ratio": (0.2, 0.5)}, bf16=True, epochs=1)
    own.train()
    ids = torch.arange(3, 12)[None]
    twin = FAMILIES["gpt2"].build()
    twin.load_state_dict(own.model.state_dict())
    torch.testing.assert_close(own.model.eval()(input_ids=ids).logits, twin.eval()(input_ids=ids).logits)


def test_a_loss_and_a_distance_of_ones_own(tmp_path):
    class Own(JointTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    distance = {"distance": lambda low, full: torch.nn.functional.mse_loss(low.logits, full.logits)}
    own = trainer(tmp_path, elastic={**ELASTIC, **distance}, epochs=1)
    own.__class__ = Own
    assert own.train().training_loss > 0


def test_a_folder_is_written_of_a_decomposed_network_only(tmp_path):
    from decomposable.hf import save_pretrained

    model = FAMILIES["gpt2"].build().eval()
    net = dn.decompose(model, {"input_ids": torch.arange(3, 12)[None]}, forward=lambda net, batch: net(**batch))
    for wrong in (model, net.extract()):
        with pytest.raises(InvalidArgumentError) as caught:
            save_pretrained(wrong, tmp_path / "no")
        assert (caught.value.option, caught.value.came) == ("net", "GPT2LMHeadModel")
    with pytest.raises(InvalidArgumentError, match="save_pretrained: the model's class cannot load"):
        net.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_causal_model_is_cut_by_data():
    model = FAMILIES["gpt2"].build().eval()
    batches = [{"input_ids": each} for each in Texts().ids.split(4)]
    net = dn.decompose(model, batches[0], forward=lambda net, batch: net(**batch), data=batches)
    net.resize_(macs=0.6)
    assert net(**batches[0]).logits.isfinite().all()
