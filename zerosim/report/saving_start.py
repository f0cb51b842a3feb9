"""From where a run goes on, for people, and what is not as in the run that saved it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.saving import SavingConfig
from zerosim.config.parts.world import WorldConfig
from zerosim.errors import InputError
from zerosim.report.look import Stack, prose
from zerosim.report.names import counted
from zerosim.state.folder import damaged_after
from zerosim.state.manifest import Manifest, read_manifest

MOST_NAMED = 6
_NOT_NAMED = {
    *MeshConfig.options(),
    *SavingConfig.options(),
    *WorldConfig.options(),
    "stage",
    "micro_batch",
    "accumulate",
    "steps",
}
"""Options that are said otherwise, or change nothing that is computed."""


def start_text(config: RunConfig) -> RenderableType | None:
    """Return from where a run goes on, and what is not as in the run that saved it; None: it begins at step 0."""
    if config.saving.resume is None:
        return None
    folder = Path(config.saving.resume)  # the step, as the command line chose it
    manifest = read_manifest(folder)
    text = f"Goes on from {folder}: step {manifest.step}, written by {counted(manifest.ranks, 'rank')}."
    changed = [*damaged_after(folder), text, *_changed(manifest, config)]
    return Stack(*map(prose, changed), close=True)


def _changed(manifest: Manifest, config: RunConfig) -> Iterator[str]:
    """Yield what is not as in the run that saved it: the global batch, and options that change what is computed."""
    try:
        before = RunConfig.from_dict({**manifest.config})
    except InputError:  # options that this version no longer has
        return
    if before.global_batch != config.global_batch:
        yield f"The global batch was {before.global_batch} rows, and is {config.global_batch} now."
    named = [name for name in OPTIONS if name not in _NOT_NAMED and before.value(name) != config.value(name)]
    if named:
        each = [f"{name} {before.value(name)} → {config.value(name)}" for name in named[:MOST_NAMED]]
        more = f" and {len(named) - len(each)} more" if len(named) > len(each) else ""
        yield f"Changed: {', '.join(each)}{more}."
