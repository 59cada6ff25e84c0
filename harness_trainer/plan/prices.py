"""A person's price list: machines by name, what they have and what an hour costs. None is shipped, as prices change.

currency: USD
flavors:
  h200x2: {gpu: h200, gpus: 2, per_hour: 9.98}
  bigbox: {gpu_memory: 96GiB, gpus: 4, per_hour: 14.00}
per_sandbox_hour: 0.05   # optional; of sandboxes that are paid for
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness_trainer.errors import ConfigError
from harness_trainer.plan.sizes import Gpu, find_gpu, parse_bytes


class Flavor(BaseModel):
    """One kind of machine. Example: Flavor(gpu="h200", gpus=2, per_hour=9.98)."""

    model_config = ConfigDict(extra="forbid")

    gpu: str | None = Field(None, description="a name of the GPU table")
    gpu_memory: str | None = Field(None, description="of each GPU where it is not in the table, e.g. 96GiB")
    gpus: int = Field(1, ge=1)
    per_hour: float = Field(gt=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> Flavor:
        if (self.gpu is None) == (self.gpu_memory is None):
            raise ValueError("give either gpu or gpu_memory")
        return self

    @property
    def known(self) -> Gpu | None:
        return None if self.gpu is None else find_gpu(self.gpu)

    @property
    def memory(self) -> int:
        return find_gpu(self.gpu).memory if self.gpu is not None else parse_bytes(str(self.gpu_memory))


class Prices(BaseModel):
    """The whole list."""

    model_config = ConfigDict(extra="forbid")

    currency: str = "USD"
    flavors: dict[str, Flavor]
    per_sandbox_hour: float | None = Field(None, gt=0)


def read_prices(path: Path) -> Prices:
    """Raises ConfigError with what is wrong in the file."""
    try:
        prices = Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        for flavor in prices.flavors.values():
            _ = flavor.memory  # a name or an amount that is none is said at once
    except OSError as error:
        raise ConfigError(f"--prices {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prices {path} is not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--prices {path}: {where}: {first['msg']}; docs/plan.md shows the form") from None
    return prices
