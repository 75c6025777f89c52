"""The recipe of `[model] hf`: whose blocks are whose, what it refuses, and that it learns. Without a daemon."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco_node.config import sources
from diloco_node.errors import ConfigError
from diloco_node.integrations.weight_files import has_weights
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.schedules import place_schedule
from tests.kit.data_kit import rows_of, write_jsonl, write_parquet
from tests.kit.hf_kit import write_hf_folder
from tests.kit.shards_given import begin

pytestmark = [
    pytest.mark.e2e,  # importing the libraries takes longer than the tests
    pytest.mark.filterwarnings("default"),  # theirs
]
recipe: Any = None


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    global recipe
    for library in ("transformers", "datasets", "torchdata"):
        pytest.importorskip(library, reason="needs the extra `hf`")
    from diloco_node.integrations import hf_recipe

    recipe = hf_recipe
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("DILOCO_TRAINER", str(tmp_path / "trainer.json"))
    HERE.clear()


def settings_of(tmp_path: Path, *paths: Path | str, **changes: Any) -> SimpleNamespace:
    model = tmp_path / "model"
    if not model.exists():
        write_hf_folder(model, 1000)
    values = {"hf": str(model), "hf_args": {}, "context": 16, "schedule_steps": 0, "eval_windows": 8, "seed": 1}
    values |= {"paths": [str(path) for path in paths], "text_field": "text", "streaming": False, "steps": 30}
    sections = {"run": {"tokens": 0}, "model": values | changes}
    settings: SimpleNamespace = recipe.settings_from(sections)
    return settings


def blocks_of(settings: SimpleNamespace, rank: int = 0, ranks: int = 1) -> Any:
    return recipe.Blocks(settings, recipe.load_model(settings)[1], rank=rank, ranks=ranks)


def epochs_of(blocks: Any, region: int, regions: int, count: int = 1) -> list[list[tuple[int, ...]]]:
    """The blocks of so many epochs of one of the regions."""
    names = [f"region-{number}" for number in range(regions)]
    begin("run", names[region], names)
    loader = blocks.loader(batch_size=1, collate_fn=lambda rows: rows)
    sampler = getattr(blocks, "_sampler", None)
    size = int(sampler.order.sizes[list(HERE.own)].sum()) // sampler._ranks.count if sampler is not None else 0
    epochs: list[list[tuple[int, ...]]] = [[] for _ in range(count + 1)]
    for place, batch in enumerate(loader):
        epochs[place // size if size else loader.epoch] += ids_of(batch)
        if epochs[count]:
            return epochs[:count]
    raise AssertionError("it has no end")


def ids_of(rows: Any) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"]) for row in rows]


def test_every_block_is_of_one_rank_of_one_region_or_held_out(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows_of(1000)), eval_windows=10_000)
    # The second region has one rank more than the first.
    everybody = [blocks_of(settings), *(blocks_of(settings, rank, 2) for rank in range(2))]
    epochs = [epochs_of(blocks, region, 2, 2) for blocks, region in zip(everybody, (0, 1, 1), strict=True)]
    train_blocks = [block for first, _ in epochs for block in first]
    assert len(train_blocks) == len(set(train_blocks))
    assert not set(train_blocks) & set(ids_of(everybody[0].held_out))
    # Of an odd number of blocks the last one is left over, and comes first in the next epoch.
    assert 1000 * 13 // 16 - len(train_blocks) - len(everybody[0].held_out) in (0, 1)
    assert all(len(block) == 16 for block in train_blocks)
    assert sorted(epochs[0][0]) == sorted(epochs[0][1])
    assert epochs[0][0] != epochs[0][1], "in another order"
    assert len({tuple(ids_of(blocks.held_out)) for blocks in everybody}) == 1
    assert len(everybody[0].held_out) == pytest.approx(1000 * 13 / 16 / 20, abs=1)


def test_rows_end_with_the_end_of_text_and_lines_of_text_do_not(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{row}\n" for row in rows_of(400)))
    (tmp_path / "binary.bin").write_bytes(b"\0" * 100)
    tokens = {}
    for path in (write_jsonl(tmp_path / "rows.jsonl", [*rows_of(400), ""]), text):
        settings = settings_of(tmp_path, path, tmp_path / "binary.bin", eval_windows=10_000)
        blocks = blocks_of(settings)
        tokens[path.suffix] = [*epochs_of(blocks, 0, 1)[0], *ids_of(blocks.held_out)]
    end = 1
    assert sum(block.count(end) for block in tokens[".jsonl"]) == 400
    assert sum(block.count(end) for block in tokens[".txt"]) == 0
    assert len(tokens[".txt"]) == 400 * 12 // 16
    with pytest.raises(ConfigError, match=r"data\.paths: 1 blocks of 16 tokens: give more text"):
        blocks_of(settings_of(tmp_path, write_jsonl(tmp_path / "few.jsonl", rows_of(2))))


def test_a_stream_is_dealt_by_rows_and_holds_rows_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(900), "body")
    settings = settings_of(tmp_path, path, streaming=True, text_field="body")
    regions = [blocks_of(settings) for _ in range(3)]
    epochs = [epochs_of(blocks, region, 3)[0] for region, blocks in enumerate(regions)]
    numbers = [{token for block in epoch for token in block if token > 51} for epoch in epochs]
    held_out = {token for block in ids_of(regions[0].held_out) for token in block if token > 51}
    assert sum(map(len, numbers)) == len(set.union(*numbers))
    assert not held_out & set.union(*numbers)
    assert min(map(len, numbers)) > 250
    assert [len(blocks.held_out) for blocks in regions] == [8, 8, 8]


def test_the_data_go_on_where_the_checkpoint_stood(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows_of(300)))

    def loader() -> Any:
        return blocks_of(settings).loader(batch_size=8, collate_fn=recipe.collate)

    first, second, whole = loader(), loader(), loader()
    batches = iter(first)
    for _ in range(31):  # in the second epoch
        next(batches)
    state = first.state_dict()
    assert state["epoch"] == 1
    second.load_state_dict(state)
    later_batches = [batch["input_ids"] for batch, _ in zip(whole, range(34), strict=False)][31:]
    again = [batch["input_ids"] for batch, _ in zip(second, range(3), strict=False)]
    assert all(torch.equal(batch_, later_batch) for batch_, later_batch in zip(again, later_batches, strict=True))


def test_it_learns_from_every_kind_of_file_and_evaluates(tmp_path: Path) -> None:
    rows = rows_of(1000)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "lines").write_text("\n".join(rows))
    write_jsonl(tmp_path / "text" / "rows.jsonl", rows, "body")
    paths = (tmp_path / "text", write_parquet(tmp_path / "rows.parquet", rows, "body"))
    settings = settings_of(tmp_path, *paths, text_field="body", hf_args={"learning_rate": 0.01, "eval_steps": 10})
    trainer = recipe.train(settings, recipe.training_arguments(settings))
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.global_step == 30
    assert len(losses) == 3
    assert losses[-1] < math.log(1060) - 1.5
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}, "linear, as long as the run"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("learning_rat", 1e-4, "model.hf_args: learning_rat is no field of TrainingArguments"),
        ("learning_rate", "fast", "invalid float value: 'fast'"),
        ("max_steps", 3, "max_steps can't be set"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(tmp_path: Path, argument: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        recipe.training_arguments(settings_of(tmp_path, hf_args={argument: value}))


def test_the_learning_rate_stands_where_the_run_is(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, hf_args={"learning_rate": 0.5, "lr_scheduler_type": "linear"}, steps=100)
    args = recipe.training_arguments(settings)
    callback = recipe.RecipeCallback(SimpleNamespace(held_out=[]))
    model = recipe.load_model(settings)[0]
    trainer = recipe.RecipeTrainer(None, 100, callback, model=model, args=args, eval_dataset=[])
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(args.max_steps)
    callback.diloco = SimpleNamespace(global_step=75)
    trainer.optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.125, 0.125]
    callback.diloco = None
    schedule.step()
    assert schedule.get_last_lr() == [0.49, 0.49]


def test_held_out_loss_of_other_parameters_is_that_of_a_model_that_has_them(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows_of(300)))
    args = recipe.training_arguments(settings)
    model, blocks = recipe.load_model(settings)[0], blocks_of(settings, 0, 1)
    settings.seed = 2
    merged = recipe.load_model(settings)[0]
    assert "lm_head.weight" in merged.state_dict(), "tied, under both names"
    loss = recipe.RecipeCallback(blocks)._loss(model, merged.state_dict(), args)
    own = recipe.RecipeCallback(blocks)._loss(merged, merged.state_dict(), args)
    assert loss == pytest.approx(own)
    assert loss != pytest.approx(recipe.RecipeCallback(blocks)._loss(model, model.state_dict(), args), rel=1e-6)


def test_random_weights_are_the_same_in_all_regions_and_those_in_the_folder_go_first(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    first, second = (recipe.load_model(settings)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    settings.seed = 2
    model = recipe.load_model(settings)[0]
    assert not torch.equal(model.state_dict()["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    model.save_pretrained(settings.hf)
    settings.seed = 1
    state = recipe.load_model(settings)[0].state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_model_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, context=65)
    with pytest.raises(ConfigError, match=r"model\.context is 65, the model has 64 positions"):
        recipe.load_model(settings)
    write_hf_folder(tmp_path / "small", 1000, vocab_size=100)
    with pytest.raises(ConfigError, match="the tokenizer has 1052 tokens, the model 100"):
        recipe.load_model(settings_of(tmp_path, hf=str(tmp_path / "small")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty can't be loaded"):
        recipe.load_model(settings_of(tmp_path, hf=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match=r"set \[model\] hf in run\.toml"):
        recipe.settings_from({"model": {"hf": None}})


def test_data_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", rows_of(100))
    (tmp_path / "text.txt").write_text("text\n")
    (tmp_path / "bad.jsonl").write_text("{")
    for changes, message in (
        ({"text_field": "body"}, r"data\.text_field: .* has no field 'body'; it has id, text"),
        ({"paths": [str(tmp_path / "text.txt")], "streaming": True}, r"data\.streaming: .*text\.txt has no rows"),
        ({"paths": [str(tmp_path / "bad.jsonl")]}, r"data\.paths: "),
        ({"paths": [f"hf:{tmp_path}/nowhere"]}, r"data\.paths: "),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            blocks_of(settings_of(tmp_path, rows, **changes), 0, 1)
        assert "\n" not in str(error.value)


def test_arguments_are_those_of_the_library(tmp_path: Path) -> None:
    values = {"learning_rate": 1e-4, "bf16": True, "lr_scheduler_kwargs": {"num_cycles": 2}, "optim": "sgd"}
    values |= {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": "4"}
    args = recipe.training_arguments(settings_of(tmp_path, hf_args=values))
    assert (args.learning_rate, args.bf16, args.gradient_accumulation_steps, args.optim) == (1e-4, True, 4, "sgd")
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert (args.output_dir, args.seed) == (str(tmp_path / "hf"), 1)
    assert recipe.training_arguments(settings_of(tmp_path, steps=0)).lr_scheduler_type == "constant_with_warmup"
    for wrong, message in (
        ({"learning_rat": 1e-4}, "learning_rat is no field of TrainingArguments"),
        ({"learning_rate": "fast"}, "invalid float value: 'fast'"),
        ({"optim": "sgdx"}, "invalid choice: 'sgdx'"),
        ({"max_steps": 10}, r"max_steps can't be set, the run says when it ends"),
    ):
        with pytest.raises(ConfigError, match=f"^model.hf_args: .*{message}"):
            recipe.training_arguments(settings_of(tmp_path, hf_args=wrong))


def test_a_dataset_has_one_name_in_the_settings_and_in_the_recipe() -> None:
    assert recipe.HUB == sources.HUB


def test_a_name_with_brackets_is_one_file_and_no_pattern(tmp_path: Path) -> None:
    for number, name in enumerate(("x1.jsonl", "x[1].jsonl")):
        (tmp_path / "rows").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "rows" / name, rows_of(100)[number * 50 : number * 50 + 50])
    tables = recipe.load_rows(str(tmp_path / "rows"), settings_of(tmp_path, tmp_path / "rows"))
    rows = [row["text"] for table, _ in tables for row in table]
    assert sorted(rows) == sorted(rows_of(100))


@pytest.mark.parametrize("name", ["model.gguf", "tf_model.h5", "flax_model.msgpack"])
def test_weights_that_nothing_reads_are_refused_and_not_made_at_random(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not has_weights(str(tmp_path))
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(ConfigError, match=rf"weights in {name}, which is not read"):
        has_weights(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert has_weights(str(tmp_path))


def test_a_stream_without_a_block_to_hold_out_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(3), "body")
    with pytest.raises(ConfigError, match="no whole block: give more text"):
        blocks_of(settings_of(tmp_path, path, streaming=True, text_field="body"), 0, 1)


def test_a_learning_rate_that_was_changed_beats_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule_of(peak: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)

    (_, before), (optimizer, schedule) = schedule_of(0.1), schedule_of(0.8)
    join = "diloco_node.integrations.hf.DilocoCallback.on_train_begin"
    state = place_schedule(schedule, before.state_dict())  # as a checkpoint does
    monkeypatch.setattr(join, lambda *_, **context: context["lr_scheduler"].load_state_dict(state))
    recipe.RecipeCallback(None).on_train_begin(None, None, None, lr_scheduler=schedule, optimizer=optimizer)
    assert schedule.base_lrs == [0.8]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
