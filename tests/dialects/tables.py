"""The readers' tables as Markdown, for docs/from_*.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from zerosim.dialects.rows import Row


def markdown(rows: Iterable[Row]) -> str:
    """Return a table of names as the pages docs/from_*.md hold it: a line for each row that has an answer here."""
    lines = ["| there | here | what it does there |", "|---|---|---|"]
    for row in rows:
        keys = ", ".join(f"`{key}`" for key in row.key.split())
        answers = {"missing": "not modelled", "ignored": "no effect", "refuse": "refused", "near": "not modelled"}
        answer = answers.get(row.says, row.here)
        here = f"near: {row.here.removesuffix(' is near')}" if row.says == "near" and row.here else answer
        here = re.sub(r"(--[a-z][a-z0-9-]*)", r"`\1`", row.here if row.here.startswith("always") else here)
        cells = [one.replace("|", "\\|") for one in (keys, here, row.does)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return the tables of docs/from_*.md, each under its page's and its heading's name."""
    from zerosim.dialects.accelerate import keys as accelerate
    from zerosim.dialects.deepspeed import keys as deepspeed
    from zerosim.dialects.megatron import step_keys as megatron
    from zerosim.dialects.torchtitan import keys as torchtitan
    from zerosim.dialects.trainer import keys as trainer

    tables = {
        "from_deepspeed": deepspeed.TABLE,
        "from_fsdp, accelerate": accelerate.TABLE,
        "from_fsdp, TrainingArguments": trainer.TABLE,
        "from_fsdp, torchtitan": torchtitan.TABLE,
        "from_megatron": megatron.TABLE,
    }
    return {name: markdown(rows) for name, rows in tables.items()}


if __name__ == "__main__":  # PYTHONPATH=tests python tests/dialects/tables.py: writes the tables into the pages
    docs = Path(__file__).parents[2] / "docs"
    for name, table in pages().items():
        page = docs / f"{name.partition(',')[0]}.md"
        before, _, after = page.read_text("utf-8").partition(f"<!-- {name} -->\n")
        rest = after.partition("<!-- end -->\n")[2]
        page.write_text(f"{before}<!-- {name} -->\n{table}<!-- end -->\n{rest}", "utf-8")
