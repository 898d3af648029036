"""hydra/launcher=local, slurm, ray: the jobs of a sweep on the engine of that name.

Hydra imports this file whenever it starts, so it stays light.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, filter_overrides, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from posx.engines import Engine
    from posx.sweep import Sweep

HERE = "hydra_plugins.posx_launchers.launcher"


@dataclass
class LocalConf:
    """Keys of hydra.launcher, as in those below."""

    _target_: str = f"{HERE}.LocalLauncher"
    jobs: int | None = None  # processes; None: as many as cores that may be used
    retries: int = 1  # how often a job is tried again whose process was killed


@dataclass
class SlurmConf:
    """`jobs` and `retries` are as above; the others have submitit's names and meanings."""

    _target_: str = f"{HERE}.SlurmLauncher"
    jobs: int | None = None  # in the queue or running at a time; None: 1000
    retries: int = 1
    max_num_timeout: int = 20  # how often a job whose time is up goes back into the queue
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int = 60  # minutes
    signal_delay_s: int = 90  # before the end of the time: save and go back into the queue
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    mem: str | None = "4GB"
    setup: list[str] | None = None  # shell lines before Python starts, such as "module load ..."
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # any other of sbatch


@dataclass
class RayConf:
    """num_cpus and num_gpus are Ray's, for each job."""

    _target_: str = f"{HERE}.RayLauncher"
    jobs: int | None = None  # given to the cluster at a time; None: 1000
    retries: int = 1
    address: str | None = None  # None: RAY_ADDRESS, or one on this machine, which is started
    num_cpus: float = 1
    num_gpus: float = 0


for name, node in {"local": LocalConf, "slurm": SlurmConf, "ray": RayConf}.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node)


class PoolLauncher(Launcher):
    """Composes the jobs here and has them done by `posx.pool`; `keys` are those of its conf."""

    def __init__(self, retries: int, **keys: Any) -> None:
        self.retries, self.keys = retries, keys

    @abstractmethod
    def engine(self, folder: Path) -> "Engine":
        """What does the jobs; `folder` is for what it has to write."""

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
        batch = initial_job_idx or ""  # a searching sweeper launches one after the other
        folder = Path(self.config.hydra.sweep.dir).absolute()
        engine = self.engine(folder / f"jobs{batch}")
        pool = Pool([self.sweep.name(words) for words in typed], prepare, engine, self.retries)
        pool.run(folder / f"jobs{batch}.csv")
        for number, outcome in sorted(pool.outcomes.items()):
            returns[number].return_value = outcome.value
            self.sweep.ended.append((typed[number], outcome))
        if pool.signals:
            self.sweep.planned, self.sweep.signal = len(typed), pool.signals[0]
            raise KeyboardInterrupt
        return [returns[number] for number in sorted(returns)]


class LocalLauncher(PoolLauncher):
    """Worker processes of this machine."""

    def engine(self, folder: Path) -> "Engine":
        from posx.engines.local import LocalEngine

        return LocalEngine(**self.keys)


class SlurmLauncher(PoolLauncher):
    """A job array of Slurm."""

    def engine(self, folder: Path) -> "Engine":
        from posx.engines.slurm import SlurmEngine

        plain = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in self.keys.items()
        }
        return SlurmEngine(folder=folder, **plain)


class RayLauncher(PoolLauncher):
    """Tasks of a Ray cluster."""

    def engine(self, folder: Path) -> "Engine":
        from posx.engines.ray import RayEngine

        return RayEngine(folder=folder, **self.keys)
