"""Which rows a trainer reads in each of several lives: a learner that is killed goes on where its checkpoint was.

Every row has a number, and the model notes those that it is trained on.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.integrations.shards import ShardLoader
from diloco_node.learner.region_shards import HERE
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.lightning_kit import quiet_trainer

pytestmark = [
    pytest.mark.e2e,  # importing the libraries takes longer than the tests
    pytest.mark.filterwarnings("default"),  # theirs
]

ROWS, BATCH = 42, 4
LAST_STEP = 3
"""Steps of a life, the last of which no checkpoint has: as if it were killed."""


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.rows:
            raise IndexError(index)  # the end, for who iterates
        return {"input_ids": torch.tensor([index])}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """In another order in each epoch, as those of Hugging Face."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))
        return iter([{"input_ids": number.view(1)} for number in order])


class Noting(nn.Module):
    """Notes the numbers of the rows that it is trained on.

    Attributes:
        rows: of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, 4)
        self.rows: list[list[int]] = []

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        self.rows.append(input_ids.flatten().tolist())
        return {"loss": (self.embedding(input_ids) - 1).square().mean()}


def kill(diloco: Any) -> None:
    """End as a killed process does, after a checkpoint."""
    diloco._close(None)


def hf_life(
    folder: Path, steps: int, *, dataset: Any = None, loader: Any = None, **arguments: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Train, with a checkpoint at each step but the last. Returns rows by batch: before the last and in it."""
    import transformers

    from diloco_node.integrations.hf import DilocoCallback

    class Killer(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            # Within the optimizer's step, as the learner's own.
            callback.diloco._checkpoints._saved_at_s = -1e9 if callback.diloco.steps < steps - 1 else 1e18

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            callback.diloco._checkpoints.wait()
            ends.append(len(model.rows))
            if callback.diloco.steps == steps:
                kill(callback.diloco)
                control.should_training_stop = True

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader() if loader is None else loader

    callback = DilocoCallback()
    model = Noting()
    ends: list[int] = []
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        max_steps=10_000,
        **arguments,
    )
    Trainer(model=model, args=settings, train_dataset=dataset or Numbers(), callbacks=[callback, Killer()]).train()
    return model.rows[: ends[-2]], model.rows[ends[-2] :]


@pytest.mark.parametrize(("micro_batches", "make"), [(1, Numbers), (2, Numbers), (1, Stream)])
def test_a_trainer_that_is_killed_reads_each_row_once_an_epoch(
    folder: Path, micro_batches: int, make: Callable[[], Any]
) -> None:
    lives = []
    for _ in range(6):
        with FakeDaemon(folder):
            lives.append(hf_life(folder, LAST_STEP, dataset=make(), gradient_accumulation_steps=micro_batches))
    for (_, lost), (early, late) in itertools.pairwise(lives):
        assert (early + late)[: len(lost)] == lost, "the step that no checkpoint had, once more"
    batches = [batch for early, _ in lives for batch in early]
    whole_epochs = [batches[start : start + 11] for start in range(0, len(batches) - 10, 11)]
    assert whole_epochs
    for epoch in whole_epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(ROWS))
    assert len(set(map(str, whole_epochs))) == len(whole_epochs), "each epoch has an order of its own"


def shard_loader(workers: int) -> ShardLoader:
    return ShardLoader(Numbers(), batch_size=BATCH, seed=1, num_workers=workers)


def own_line(batches: int) -> list[list[int]]:
    """The region's batches in one life, without a daemon."""
    loader = shard_loader(0)
    line: list[list[int]] = []
    while len(line) < batches:
        line += [batch["input_ids"].flatten().tolist() for batch in loader]
    return line[:batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_of_shards_that_is_killed_trains_again_what_is_in_no_merge(folder: Path, workers: int) -> None:
    """Whatever its checkpoint says: nobody has asked this learner for a contribution."""
    for _ in range(3):
        with FakeDaemon(folder):
            early, late = hf_life(folder, LAST_STEP, loader=shard_loader(workers))
        assert early + late == own_line(len(early + late))
    assert {row for batch in early + late for row in batch} <= set(HERE.own) & set(range(ROWS))


@pytest.mark.parametrize("is_its_own_loader", [True, False])
def test_a_trainer_whose_data_are_restored_at_their_end_begins_the_next_epoch(
    folder: Path, *, is_its_own_loader: bool
) -> None:
    """Killed in the evaluation after an epoch, or given fewer rows: the Trainer would stop, as if all were trained."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def life(steps: int, rows: int) -> list[list[int]]:
        loader = loaders.StatefulDataLoader(Numbers(rows), batch_size=BATCH)
        with FakeDaemon(folder):
            early, late = hf_life(folder, steps, dataset=Numbers(rows), loader=None if is_its_own_loader else loader)
        return early + late

    life(12 if not is_its_own_loader else 9, ROWS)
    rows = 20 if is_its_own_loader else ROWS
    assert sorted(itertools.chain(*life(rows // BATCH, rows))) == list(range(rows // BATCH * BATCH))


def test_a_trainer_whose_data_have_no_position_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    with FakeDaemon(folder), caplog.at_level(logging.WARNING):
        hf_life(folder, 2, train_sampling_strategy="group_by_length", length_column_name="input_ids")
    assert "begins its data anew: the position in the data can't be kept" in caplog.text


class Pipeline(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Rows whose order nothing outside of it knows, as those of WebDataset."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"input_ids": torch.tensor([number])} for number in range(ROWS)])


@pytest.mark.parametrize(("make", "is_told"), [(Pipeline, True), (Stream, False)])
def test_a_stream_whose_order_may_be_another_in_each_life_is_told_when_it_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], is_told: bool
) -> None:
    pytest.importorskip("transformers")
    for count in (0, int(is_told)):
        with FakeDaemon(folder):
            hf_life(folder, 2, dataset=make())
        assert caplog.text.count("a Pipeline has no set_epoch(): nobody knows") == count


def test_a_trainer_that_is_to_skip_no_data_begins_them_anew_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    lives = []
    for _ in range(2):
        with FakeDaemon(folder):
            lives.append(hf_life(folder, 2, ignore_data_skip=True)[0])
    assert lives[0] == lives[1]
    assert "begins its data anew: ignore_data_skip=True asks for that" in caplog.text


def accelerate_life(folder: Path, steps: int, batch: int = BATCH) -> list[list[int]]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from diloco_node.integrations.prepared_loader import PreparedLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = Noting()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    data = PreparedLoader(loader)
    with FakeDaemon(folder):
        diloco = diloco_node.attach(model, optimizer, stateful={"data": data})
        for batch in data:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            diloco.step(tokens=BATCH)
            if diloco.steps < steps:
                diloco.checkpoint()
            else:
                break
        kill(diloco)
    return model.rows


def test_a_loop_with_accelerate_that_is_killed_reads_each_row_once_an_epoch(folder: Path) -> None:
    pytest.importorskip("accelerate")
    lives = [accelerate_life(folder, LAST_STEP + 1) for _ in range(5)]
    for life, later in itertools.pairwise(lives):
        assert later[0] == life[-1]
    batches = [batch for life in lives[:-1] for batch in life[:-1]] + lives[-1]
    assert sorted(itertools.chain(*batches[:11])) == list(range(ROWS))
    assert len(batches) > 11
    assert not set(map(str, batches[11:])) & set(map(str, batches[:5]))


def test_a_loop_with_accelerate_goes_on_behind_its_rows_with_batches_of_another_size(folder: Path) -> None:
    pytest.importorskip("accelerate")
    first = accelerate_life(folder, 5)
    second = accelerate_life(folder, 6, 2 * BATCH)
    rows = [*itertools.chain(*first[:4], *second)]
    assert len(set(rows[:ROWS])) == min(ROWS, len(rows)), "each row once in the epoch"


def test_a_loader_whose_order_is_drawn_anew_is_refused() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from diloco_node.integrations.prepared_loader import PreparedLoader

    loader = torch.utils.data.DataLoader(Numbers(), shuffle=True)
    with pytest.raises(LearnerError, match="was not prepared"):
        PreparedLoader(loader)
    with pytest.raises(LearnerError, match=r"RandomSampler draws another order.*use_seedable_sampler=True"):
        PreparedLoader(Accelerator(cpu=True).prepare(loader))


def lightning_life(
    folder: Path,
    steps: int,
    loader: Any,
    *,
    interval: str = "step",
    validations: list[int] | None = None,
    **arguments: Any,
) -> tuple[list[list[int]], int]:
    """Returns rows, and the epoch that the schedule is in. validations: gets the number of each one's epoch."""
    import lightning.pytorch as lightning

    from diloco_node.integrations.lightning import LightningDiloco

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Noting()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": interval}]

        def on_train_batch_start(self, *_: Any) -> None:
            callback.diloco._checkpoints._saved_at_s = 1e18  # none is due by itself, on however slow a machine

        def on_train_batch_end(self, *_: Any) -> None:
            if callback.diloco.steps < steps:
                callback.diloco.checkpoint()
            else:
                kill(callback.diloco)
                self.trainer.should_stop = True

        def validation_step(self, *_: Any) -> None:
            self.log("val_loss", 1.0)

        def on_validation_start(self) -> None:
            if validations is not None and not self.trainer.should_stop:
                validations.append(self.trainer.current_epoch)

    callback = LightningDiloco()
    trainer = quiet_trainer(folder, callback, num_sanity_val_steps=0, **arguments)
    if validations is not None:
        trainer.callbacks.append(lightning.callbacks.EarlyStopping("val_loss", patience=100))
    module = Module()
    with FakeDaemon(folder):
        trainer.fit(module, loader, None if validations is None else torch.utils.data.DataLoader(Numbers()))
    return module.inner.rows, trainer.lr_scheduler_configs[0].scheduler.last_epoch


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_lightning_that_is_killed_goes_on_with_a_loader_that_has_a_position(folder: Path, *, is_shuffled: bool) -> None:
    """Also in later epochs, at whose beginning Lightning makes an iterator by itself."""
    pytest.importorskip("lightning.pytorch")
    from torchdata.stateful_dataloader import StatefulDataLoader

    lives = [
        lightning_life(folder, LAST_STEP + 1, StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=is_shuffled))
        for _ in range(9)
    ]
    rows = [life for life, _ in lives]
    for life, later in itertools.pairwise(rows):
        assert later[0] == life[-1]
    line = list(itertools.chain(*(batch for life in rows[:-1] for batch in life[:-1]), *rows[-1]))
    epochs = [line[start : start + ROWS] for start in range(0, len(line), ROWS)]
    assert [sorted(epoch) for epoch in epochs[:2]] == [list(range(ROWS))] * 2
    assert (epochs[0] == epochs[1]) != is_shuffled
    assert [at for _, at in lives] == list(range(4, 31, 3)), "the schedule, too"


class OwnPlace(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """A stream that knows where it is: whoever reads ahead of it takes rows from all others."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.place < ROWS:
            self.place += 1
            yield {"input_ids": torch.tensor([self.place - 1])}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_lightning_begins_a_stream_at_its_first_row(folder: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from torchdata.stateful_dataloader import StatefulDataLoader

    first, second = (
        lightning_life(folder, LAST_STEP + 1, StatefulDataLoader(OwnPlace(), batch_size=BATCH))[0] for _ in range(2)
    )
    assert [rows[0] for rows in first] == [0, 4, 8, 12]
    assert [rows[0] for rows in second] == [16, 20, 24, 28], "the batch that Lightning had read ahead is passed over"


@pytest.mark.parametrize(
    ("options", "length"),
    [({"limit_train_batches": 5}, 5), ({"limit_train_batches": 0.5}, 5), ({"val_check_interval": 0.25}, 11)],
)
def test_lightning_that_is_killed_keeps_epochs_of_another_length(
    folder: Path, options: dict[str, Any], length: int
) -> None:
    pytest.importorskip("lightning.pytorch")
    from torchdata.stateful_dataloader import StatefulDataLoader

    line: list[int] = []
    for life in range(5):
        loader = StatefulDataLoader(Numbers(), batch_size=BATCH)
        rows, epoch = lightning_life(folder, LAST_STEP + 1, loader, interval="epoch", validations=[], **options)
        line += [batch[0] for batch in rows[:-1]]
        assert epoch == (life * LAST_STEP + LAST_STEP + 1) // length
    assert line == [BATCH * (number % length) for number in range(5 * LAST_STEP)]


@pytest.mark.parametrize(("is_sharded", "length"), [(False, 11), (True, 10)])
@pytest.mark.parametrize("lives", [5, 2])
def test_lightning_that_is_killed_within_epochs_ends_each_at_its_last_batch(
    folder: Path, lives: int, length: int, *, is_sharded: bool
) -> None:
    """Also where the checkpoint is the one of the last batch: with few lives, each has a whole epoch."""
    pytest.importorskip("lightning.pytorch")
    from torchdata.stateful_dataloader import StatefulDataLoader

    steps = LAST_STEP + 1 if lives > 2 else length + 1
    validations: list[int] = []
    schedule = []
    for _ in range(lives):
        loader = shard_loader(0) if is_sharded else StatefulDataLoader(Numbers(), batch_size=BATCH)
        schedule.append(lightning_life(folder, steps, loader, interval="epoch", validations=validations)[1])
    assert schedule == [(life * (steps - 1) + steps) // length for life in range(lives)]
    assert validations == list(range(schedule[-1]))


def test_lightning_of_shards_that_is_killed_trains_again_what_is_in_no_merge(folder: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    for _ in range(3):
        rows, _ = lightning_life(folder, LAST_STEP + 1, shard_loader(2))
        assert rows == own_line(len(rows))


def test_lightning_says_what_has_no_position(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lightning.pytorch")
    with caplog.at_level(logging.WARNING):
        lightning_life(folder, 2, torch.utils.data.DataLoader(Numbers(), batch_size=BATCH))
    assert "begins its data anew: a DataLoader has no position" in caplog.text
    loader = shard_loader(0)
    with caplog.at_level(logging.WARNING):
        lightning_life(folder, 2, loader, reload_dataloaders_every_n_epochs=1)
    assert "begins its data anew: with reload_dataloaders_every_n_epochs" in caplog.text
