"""A Hugging Face `Trainer` as a region's learner. The line that joins the run is the callback.

    pip install 'diloco-node[hf]'
    diloco-node start --region us-east -- python examples/hf_trainer.py

The README beside it has all commands of a run in two regions, one of them with two ranks.

A small Llama with random weights learns Python's standard library byte by byte. Each region reads its own part of it.
"""

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import diloco_node
from diloco_node.integrations.hf import DilocoCallback

CONTEXT = 64


class Bytes(torch.utils.data.Dataset):
    """Windows of text. `place()` says which part is this region's."""

    def __init__(self) -> None:
        index, count = diloco_node.place()
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        windows = values[: len(values) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self.windows = windows[index::count]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    torch.manual_seed(0)  # the first parameters are the same in every region
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_steps=1_000_000,  # the run says when it is over
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # else several ranks on a CPU would train apart
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=Bytes(), callbacks=[DilocoCallback()]
    )
    trainer.train()


if __name__ == "__main__":
    main()
