"""The units of blocks that predict further tokens (`nn/mtp.py`): for each the table again, a block, the head again."""

from __future__ import annotations

from functools import partial

from zerosim.models.builder import Ahead, Builder, Use
from zerosim.nn import Unit
from zerosim.nn.aside import Aside
from zerosim.nn.mtp import Further, FurtherBlock, FurtherHead, FurtherTable


def further_of(new: Builder) -> Ahead | None:
    """Return what the units read, and a function that builds them; None without further tokens."""
    if not new.mtp.layers:
        return None
    further = Further(new.mtp.layers, new.mtp.each)
    return Ahead(further, partial(further_units, new, further))


def further_units(new: Builder, further: Further, table: Use, head: Use) -> list[Unit]:
    """Build the units of every depth that predicts a further token: the table again, a block, the head again. A block's
    number, and so its name, follows those of the model's blocks, as in DeepSeek-V3's files."""
    row, found, first = new.sizes.decoder, list[Unit](), Aside()
    for depth in range(1, further.depths + 1):
        state, number, is_last = first if depth == 1 else Aside(), new.sizes.layers + depth - 1, depth == further.depths
        embed = FurtherTable(table.table, further, depth, state)
        found.append(Unit(f"mtp{depth}.embed", table.within, embed, reduces=False, makes=(state,)))
        if new.only is None or f"{row.blocks}.{number}" in new.only:
            make = partial(FurtherBlock, state=state)
            block = new.unit(f"{row.blocks}.{number}", make, row.prefix, number, reads=(state,))
            found.append(new.wrap(number, block))
        loss = FurtherHead(further, depth, first if is_last else None)
        reduces, reads = depth == 1 and not new.sizes.tie_embeddings, (first,) if is_last else ()
        found.append(Unit(f"mtp{depth}.head", head.within, loss, reduces=reduces, reads=reads))
        found[-1].defers = False
    return found
