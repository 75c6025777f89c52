"""torchtitan's trainer as a region's learner. A subclass with two methods joins the run; its command line stays.

    pip install 'diloco-node[titan]'
    diloco-node start --region us-east -- \
        torchrun --standalone --nproc-per-node 8 examples/torchtitan_train.py --job.config_file train.toml

Leave `checkpoint.enable` off: its parameters would take the place of the run's. Set `training.steps` beyond the end
of the run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer, main

import diloco_node


class DilocoTrainer(Trainer):
    def __init__(self, job_config: JobConfig) -> None:
        spec = get_train_spec(job_config.model.name)
        region_spec = replace(spec, build_dataloader_fn=own_part(spec.build_dataloader_fn))
        register_train_spec(job_config.model.name, region_spec)
        super().__init__(job_config)

    def train(self) -> None:
        if len(self.model_parts) > 1:
            raise ValueError("several pipeline stages on a rank: set parallelism.pipeline_parallel_schedule to 1F1B")
        optimizer = self.optimizers.optimizers[0]  # not the container, whose state_dict() is in another form
        stateful = {"trainer": self, "data": self.dataloader, "schedule": self.lr_schedulers}
        with diloco_node.attach(self.model_parts[0], optimizer, step="auto", stateful=stateful) as self.diloco:
            super().train()

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not self.diloco.should_stop


def own_part(build: Callable[..., Any]) -> Callable[..., Any]:
    """A region reads the text as further data-parallel ranks would. All regions need the same number of ranks."""
    index, count = diloco_node.place()

    def build_own(*, dp_world_size: int, dp_rank: int, **options: Any) -> Any:
        loader = build(dp_world_size=count * dp_world_size, dp_rank=index * dp_world_size + dp_rank, **options)
        load = loader.load_state_dict

        def load_same_part(state: dict[str, Any]) -> None:
            if state.get("world_size", count * dp_world_size) == count * dp_world_size:
                load(state)
            else:  # torchtitan fails with that
                logger.warning("the regions or their ranks are more or fewer than before: the text is begun anew")

        loader.load_state_dict = load_same_part
        return loader

    return build_own


if __name__ == "__main__":
    main(DilocoTrainer)
