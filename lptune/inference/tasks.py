"""Tasks of EleutherAI's evaluation harness: reads them before weights are read, then runs them.

The package lm_eval is an extra. Only harness.py imports it, and only when a config
names tasks.
"""

import importlib.util
from typing import TYPE_CHECKING

from lptune.base.errors import UserError, how_to_install
from lptune.config import HarnessConfig
from lptune.data import Tokenizer
from lptune.distributed import World, machine_first

if TYPE_CHECKING:
    from lptune.inference.harness import Tasks


def read_tasks(cfg: HarnessConfig, tokenizer: Tokenizer, world: World) -> "Tasks | None":
    """The tasks of `cfg.tasks`, with their data sets; None: there are none. A collective.

    Raises UserError where lm_eval is missing or too old, for a task that is unknown or cannot be read, and
    for a task folder or a metric of the hub without `cfg.run_task_code`.
    """
    if not cfg.tasks:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"harness.tasks: lm_eval is not installed; {how_to_install('eval')}")
    if cfg.chat and tokenizer.template is None:
        raise UserError(
            f"harness.chat: {tokenizer.folder} has no chat template; set prompts.chat_template, or "
            "harness.chat=false"
        )
    try:
        from lptune.inference.harness import Tasks
    except (ImportError, OSError) as error:
        what = f"harness.tasks: lm_eval cannot be imported: {error}"
        raise UserError(f"{what}; {how_to_install('eval')}") from None
    with machine_first(world, "reading harness.tasks"):  # one rank downloads; the others read its cache
        return Tasks(cfg)
