#!/usr/bin/env bash
# accelerate 1.15.0 and Transformer Engine 2.9.0: asking for amax_compute_algo "most_recent" gives "max".
#
# One would guess that TERecipeKwargs(amax_compute_algo="most_recent"), whose docstring calls it the default, makes a
# DelayedScaling recipe that scales by the newest amax. accelerate passes only what differs from its own defaults, and
# "most_recent" is one: nothing is passed. Transformer Engine's own default is the largest of 1,024 steps. So both who
# ask and who do not get "max", and the documented default cannot be had. Transformer Engine is read here, not run: it
# needs a GPU's libraries.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q accelerate==1.15.0
"$work/venv/bin/pip" install -q --no-deps transformer_engine==2.9.0
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import ast
from importlib.metadata import files

from accelerate.utils import TERecipeKwargs

passed = {algo: TERecipeKwargs(amax_compute_algo=algo).to_kwargs() for algo in ("max", "most_recent")}
print(f"accelerate 1.15.0 passes {passed}")
assert passed == {"max": {"amax_compute_algo": "max"}, "most_recent": {}}

[source] = [one for one in files("transformer_engine") if str(one) == "transformer_engine/common/recipe/__init__.py"]
[recipe] = [one for one in ast.parse(source.read_text()).body if getattr(one, "name", "") == "DelayedScaling"]
defaults = {
    line.target.id: line.value.value
    for line in recipe.body
    if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant)
}
print(f"Transformer Engine 2.9.0: DelayedScaling has {defaults['amax_compute_algo']!r} of {defaults['amax_history_len']}")
assert (defaults["amax_compute_algo"], defaults["amax_history_len"]) == ("max", 1024)
PY
