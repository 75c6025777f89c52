"""A causal language model of Hugging Face as the learner of a region: `diloco-node start` with `[model] hf`.

`python -m diloco_node.integrations.hf_recipe` reads the settings that `start` has checked from the file that
`DILOCO_TRAINER` names; `[model] hf_args` are `TrainingArguments`. With `--check` it only says whether they fit.

Every region tokenises the same rows and packs them into blocks of `[model] context` tokens. Every twentieth block is
held out, the same in all regions; the others are rows of the run's virtual shards. A stream is dealt by rows instead,
before it is packed: the shard of a row is a hash of its text.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace as Settings
from typing import Any, Final, NoReturn

import torch
import transformers
from datasets import concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError
from torch.func import functional_call
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import default_data_collator as collate

from diloco_node import place
from diloco_node.core.data_shards import SHARDS
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.integrations.hf import DilocoCallback
from diloco_node.integrations.loader import EndlessLoader
from diloco_node.integrations.model_export import one_line
from diloco_node.integrations.shards import ShardSampler
from diloco_node.integrations.weight_files import has_weights
from diloco_node.learner.builtin.text_files import text_files
from diloco_node.learner.builtin.trainer import SETTINGS_VARIABLE, SETTLE_S, read_settings_file
from diloco_node.learner.region_shards import HERE, owns

HUB: Final = "hf:"
"""Prefix of a data path that names a dataset for `datasets.load_dataset`: hf:NAME or hf:NAME#CONFIG."""

KINDS: Final = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}
LINES_AT_ONCE, ROWS_AT_ONCE = 10_000, 1_000  # packed together; less than a block is left over of each such batch
HELD_OUT_EVERY, STEPS_ENDLESS, STEPS_ALONE = 20, 10**9, 1_000


def settings_from(sections: Mapping[str, Mapping[str, Any]]) -> Settings:
    """The settings of all sections, under the names that they have in run.toml (docs/settings.md)."""
    settings = Settings(**{name: value for section in sections.values() for name, value in section.items()})
    if not getattr(settings, "hf", None):
        raise ConfigError(f"{SETTINGS_VARIABLE} names no model: set [model] hf in run.toml, and use diloco-node start")
    return settings


def training_arguments(settings: Settings) -> transformers.TrainingArguments:
    """The recipe's own `TrainingArguments`, and those of `[model] hf_args` over them. Raises ConfigError: bad ones."""
    for name in {"max_steps", "num_train_epochs"} & set(settings.hf_args):
        raise ConfigError(f"model.hf_args: {name} can't be set, the run says when it ends: run.steps or run.tokens")
    has_end = settings.schedule_steps or settings.steps or settings.tokens
    folder = Path(os.environ.get(SETTINGS_VARIABLE, "trainer.json")).with_name("hf")
    loop = {"max_steps": STEPS_ENDLESS, "eval_strategy": "steps", "eval_steps": 200, "save_strategy": "no"}
    quiet = {"output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "seed": settings.seed}
    kind = "linear" if has_end else "constant_with_warmup"
    # On a CPU several ranks would train apart without `use_cpu`.
    device = {"use_cpu": not torch.accelerator.is_available()}
    values = loop | quiet | device | {"lr_scheduler_type": kind} | settings.hf_args
    words = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    parser = transformers.HfArgumentParser(transformers.TrainingArguments, allow_abbrev=False)
    parser.error = _refuse_arguments
    try:
        arguments, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"model.hf_args: {one_line(error)}") from error
    if unknown:
        raise ConfigError(f"model.hf_args: {unknown[0].partition('=')[0].lstrip('-')} is no field of TrainingArguments")
    return arguments


def _refuse_arguments(message: str) -> NoReturn:
    raise ConfigError(f"model.hf_args: {message.removeprefix('argument ')}")


def load_model(settings: Settings) -> tuple[Any, Any]:
    """Load model and tokenizer: the weights in the folder, or random ones, the same in all regions; or ConfigError."""
    is_trained = has_weights(settings.hf)
    try:
        config = transformers.AutoConfig.from_pretrained(settings.hf)
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.hf)
        transformers.set_seed(settings.seed)
        if is_trained:
            model = transformers.AutoModelForCausalLM.from_pretrained(settings.hf, dtype=torch.float32)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # the libraries have no common class of errors
        raise ConfigError(f"model.hf: {settings.hf} can't be loaded: {one_line(error)}") from error
    vocabulary, tokens = model.get_input_embeddings().num_embeddings, tokenizer.vocab_size
    if tokens > vocabulary:
        raise ConfigError(f"model.hf: the tokenizer has {tokens} tokens, the model {vocabulary}: name another")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or settings.context
    if settings.context > positions:
        raise ConfigError(f"model.context is {settings.context}, the model has {positions} positions: set at most that")
    return model, tokenizer


def load_rows(path: str, settings: Settings) -> Iterator[tuple[Any, bool]]:
    """Load a data path by kind of files: rows with a column `text` alone, and whether they are lines of text."""
    files: dict[str, Any] = {}
    for file in [] if path.startswith(HUB) else text_files([path] if path else []):
        kind = KINDS.get(file.path.suffix, "text")
        if kind != "text" or not file.is_binary:
            files.setdefault(kind, []).append(glob.escape(str(file.path)))  # else `[1]` in a name is a pattern
    if settings.streaming and "text" in files:
        raise ConfigError(f"data.streaming: {files['text'][0]} has no rows; give JSONL, Parquet or hf:NAME")
    name, _, config = path.removeprefix(HUB).partition("#")
    for kind, names in ({name: None} if path.startswith(HUB) else files).items():
        is_text = kind == "text" and names is not None
        lines = {"sample_by": "line", "keep_linebreaks": True, "encoding_errors": "replace"} if is_text else {}
        options = {"data_files": names, "split": "train", "streaming": settings.streaming, **lines}
        rows = load_dataset(kind, None if names else config or None, **options)
        column = "text" if is_text else settings.text_field
        columns = rows.column_names or list(next(iter(rows)))
        if column not in columns:
            raise ConfigError(f"data.text_field: {path} has no field {column!r}; it has {', '.join(columns)}")
        rows = rows.select_columns([column])
        yield rows if column == "text" else rows.rename_column(column, "text"), is_text


def pack(rows: dict[str, list[str | None]], *, tokenizer: Any, context: int, is_text: bool) -> dict[str, Any]:
    """Tokenise rows into blocks of `context` tokens. An end-of-text token follows each row; lines are joined again."""
    texts = [text for text in rows["text"] if text]
    end = [] if is_text or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = ["".join(texts)] if is_text or not texts else texts
    ids = [*chain.from_iterable(piece + end for piece in tokenizer(pieces, add_special_tokens=False)["input_ids"])]
    blocks = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    return {"input_ids": blocks, "labels": blocks}


def _hash_of(row: dict[str, Any]) -> tuple[int, bool]:
    """A number drawn for a row of a stream, and whether the row is held out."""
    number = zlib.crc32(repr(row["text"]).encode())
    return number // HELD_OUT_EVERY, number % HELD_OUT_EVERY == 0


def _is_own(row: dict[str, Any], *, flags: torch.Tensor, rank: int, ranks: int) -> bool:
    number, is_held_out = _hash_of(row)
    return not is_held_out and owns(flags, number % SHARDS) and number // SHARDS % ranks == rank


class Blocks:
    """The blocks of one rank of this region, epoch after epoch, and those that are held out."""

    def __init__(self, settings: Settings, tokenizer: Any, *, rank: int, ranks: int) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        try:
            sources = [item for path in settings.paths or ("",) for item in load_rows(path, settings)]
            if settings.streaming:
                rows = concatenate_datasets([item for item, _ in sources])
                eval_rows = rows.filter(lambda row: _hash_of(row)[1])
                self._rows = rows.filter(partial(_is_own, flags=HERE.flags, rank=rank, ranks=ranks))
                self.held_out = list(self._pack(eval_rows, is_text=False).take(settings.eval_windows))
                if not self.held_out:
                    raise ConfigError("data.paths: the rows held out make no whole block: give more text")
                return
            self._blocks = concatenate_datasets([self._pack(item, is_text) for item, is_text in sources])
        except (OSError, ValueError, RuntimeError, LookupError, DatasetsError) as error:
            raise ConfigError(f"data.paths: {one_line(error)}") from error
        numbers = range(len(self._blocks))
        self.held_out = [self._blocks[number] for number in numbers[::HELD_OUT_EVERY][: settings.eval_windows]]
        self._blocks = self._blocks.select([number for number in numbers if number % HELD_OUT_EVERY])
        if len(self._blocks) < ranks:
            raise ConfigError(f"data.paths: {len(numbers)} blocks of {settings.context} tokens: give more text")
        self._sampler = ShardSampler(len(self._blocks), seed=settings.seed, rank=rank, ranks=ranks)

    def _pack(self, rows: Any, is_text: bool) -> Any:
        options = {"tokenizer": self._tokenizer, "context": self._settings.context, "is_text": is_text}
        size = LINES_AT_ONCE if is_text else ROWS_AT_ONCE
        return rows.map(pack, batched=True, batch_size=size, remove_columns=["text"], fn_kwargs=options)

    def loader(self, **options: Any) -> EndlessLoader:
        """Batches without end: of the region's shards, in an order drawn from the seed; of a stream in its own."""
        if self._settings.streaming:
            return EndlessLoader(lambda _: StatefulDataLoader(self._pack(self._rows, is_text=False), **options))
        return EndlessLoader(lambda _: StatefulDataLoader(self._blocks, sampler=self._sampler, **options))


class RecipeTrainer(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose batches have no end, and whose learning rate stands where the run is."""

    def __init__(self, loader: EndlessLoader, run_steps: int, callback: RecipeCallback, **options: Any) -> None:
        super().__init__(**options, callbacks=[callback])
        self._loader, self._run_steps, self._callback = loader, run_steps, callback

    def get_train_dataloader(self) -> Any:
        """Batches of this rank, from where the learner's checkpoint stood."""
        return self._loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule as long as the run; it asks for the run's step instead of counting its own."""
        schedule = super().create_scheduler(self._run_steps, optimizer)
        if isinstance(schedule, LambdaLR):
            schedule.lr_lambdas = [partial(self._callback.run_factor, factor) for factor in schedule.lr_lambdas]
        return schedule


class RecipeCallback(DilocoCallback):
    """Joins the run, and evaluates the merged parameters too."""

    def __init__(self, blocks: Blocks, **options: Any) -> None:
        super().__init__(**options)
        self._blocks = blocks

    def run_factor(self, factor: Callable[[int], float], count: int) -> float:
        """Part of the peak learning rate at the run's step; before it is joined, after `count` steps."""
        return factor(count if self.diloco is None else self.diloco.global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Join, and begin at the learning rate of the run's step."""
        schedule, groups = context["lr_scheduler"], context["optimizer"].param_groups
        super().on_train_begin(args, state, control, **context)
        for group, peak, factor in zip(groups, schedule.base_lrs, getattr(schedule, "lr_lambdas", ()), strict=False):
            group["lr"] = peak * factor(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Evaluate once more when the run is over."""
        super().on_step_end(args, state, control, **context)
        control.should_evaluate |= control.should_training_stop
        if control.should_training_stop and self.diloco is not None and self.diloco.is_attached:
            self.diloco.checkpoint()  # first: a supervisor that stops it may not wait for two evaluations
            self.diloco.settle(SETTLE_S)

    def on_evaluate(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Report held-out losses: of the own parameters, and of the merged ones where no rank has only a part."""
        if self.diloco is None or args.process_index:
            return
        loss, global_loss = context["metrics"]["eval_loss"], None
        if self.diloco.is_attached and not args.fsdp:
            global_loss = self._loss(context["model"], self.diloco.global_state_dict(), args)
        self.diloco.evaluated(val_loss=loss, val_loss_global=global_loss)

    def _loss(self, model: Any, parameters: Mapping[str, torch.Tensor], args: Any) -> float:
        values = {name: parameters[name].to(args.device) for name, _ in model.named_parameters()}  # tied ones once
        blocks, size, total = self._blocks.held_out, args.eval_batch_size, 0.0
        for start in range(0, len(blocks), size):
            inputs = {name: value.to(args.device) for name, value in collate(blocks[start : start + size]).items()}
            with torch.no_grad():
                total += functional_call(model, values, (), inputs).loss.item() * len(inputs["labels"])
        return total / len(blocks)


def train(settings: Settings, args: transformers.TrainingArguments) -> RecipeTrainer:
    """Train until the run is over; without a daemon, to the end of the schedule."""
    model, tokenizer = load_model(settings)
    blocks = Blocks(settings, tokenizer, rank=args.process_index, ranks=args.world_size)
    options = {"batch_size": args.train_batch_size, "num_workers": args.dataloader_num_workers, "collate_fn": collate}
    loader = blocks.loader(**options)
    tokens = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * settings.context * place()[1]
    limits = [limit for limit in (settings.steps, math.ceil(settings.tokens / tokens)) if limit]
    run_steps = settings.schedule_steps or min(limits, default=STEPS_ENDLESS)
    if "DILOCO_SOCKET" not in os.environ:
        args.max_steps = run_steps if run_steps < STEPS_ENDLESS else STEPS_ALONE
    callback = RecipeCallback(blocks, stateful={"data": loader})
    trainer = RecipeTrainer(loader, run_steps, callback, model=model, args=args, eval_dataset=blocks.held_out)
    try:
        trainer.train()
    except BaseException as error:
        callback.fail(error)
        raise
    return trainer


def main() -> int:
    """Train, or with `--check` only look whether the settings fit. Returns the exit code."""
    transformers.logging.set_verbosity_error()
    try:
        settings = settings_from(read_settings_file())
        args = training_arguments(settings)
        if "--check" not in sys.argv[1:]:
            train(settings, args)
    except DilocoError as problem:
        sys.stderr.write(f"learner: {problem}\n")
        return problem.exit_code
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
