"""hydra/launcher=local: the jobs of a sweep on worker processes that posx keeps.

Hydra imports this file whenever it starts, so it stays light.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, filter_overrides, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

if TYPE_CHECKING:
    from posx.sweep import Sweep


@dataclass
class LocalConf:
    """Keys of hydra.launcher."""

    _target_: str = "hydra_plugins.posx_local.launcher.LocalLauncher"
    jobs: int | None = None  # processes; None: as many as cores that may be used
    retries: int = 1  # how often a job is tried again whose process was killed


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalConf)


class LocalLauncher(Launcher):
    """Composes the jobs here and has them done by `posx.pool`."""

    def __init__(self, jobs: int | None, retries: int) -> None:
        self.jobs, self.retries = jobs, retries

    def setup(
        self, *, hydra_context: HydraContext, task_function: "Sweep", config: DictConfig
    ) -> None:
        self.context, self.sweep, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from posx.pool import Pool

        returns: dict[int, JobReturn] = {}

        def prepare(number: int) -> Any:
            config = self.context.config_loader.load_sweep_config(
                self.config, list(job_overrides[number])
            )
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = initial_job_idx + number
            returns[number] = run_job(
                hydra_context=self.context,
                task_function=self.sweep.prepare,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            return returns[number].return_value

        typed = [list(filter_overrides(words)) for words in job_overrides]
        pool = Pool([self.sweep.name(words) for words in typed], prepare, self.jobs, self.retries)
        batch = initial_job_idx or ""  # a searching sweeper launches one after the other
        pool.run(Path(self.config.hydra.sweep.dir, f"jobs{batch}.csv"))
        for number, outcome in sorted(pool.outcomes.items()):
            returns[number].return_value = outcome.value
            self.sweep.ended.append((typed[number], outcome))
        if pool.signals:
            self.sweep.planned, self.sweep.signal = len(typed), pool.signals[0]
            raise KeyboardInterrupt
        return [returns[number] for number in sorted(returns)]
