"""Tables of kernels: every number is what others measured, and a broken table is refused by its key."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zerosim.config.presets.hardware import read_hardware
from zerosim.config.presets.kernel_tables import FORMS, GROUPED, PRODUCTS, packaged_tables, read_tables
from zerosim.device.work import IN_8_BITS, OF_LINEAR
from zerosim.errors import InputError

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))
from kernel_tables import TABLES, tables  # noqa: E402


def test_every_number_is_made_of_measured_kernels() -> None:
    made = tables()
    assert {path.name for path in TABLES.glob("*.toml")} == made.keys()
    for name, text in made.items():
        assert (TABLES / name).read_text("utf-8") == text, (
            f"run python tests/kernel_tables.py write, then look at {name}"
        )


def test_a_table_repeats_the_products_that_it_is_made_of() -> None:
    """Within 8 % of the total time of the products of A100 and B200 of more than 0.1 ms, by kind."""
    measured = tomllib.loads((TESTS / "measured/kernels.toml").read_text("utf-8"))
    for part, name in (("gemm_a100_pcie", "a100-pcie"), ("gemm_b200", "b200")):
        table, peak = packaged_tables(name), measured[part]["peak_tflops"] * 1e12
        for kind in ("linear", "linear_dgrad", "linear_wgrad"):
            took = modelled = 0.0
            for of, b, m, k, n, *_, share in measured[part]["rows"]:
                at_peak = 2 * b * m * k * n / peak
                if of == kind and at_peak > 1e-4:
                    took += at_peak / share
                    modelled += table.products[kind].seconds(at_peak) / table.narrow.at(min(m, k, n))
            assert modelled == pytest.approx(took, rel=0.08)


def test_a_table_repeats_the_grouped_products_that_it_is_made_of() -> None:
    """Within 15 % of each kind's total time."""
    rows = tomllib.loads((TESTS / "measured/kernels.toml").read_text("utf-8"))["grouped"]["rows"]
    for gpu, name, peak in (("A100 PCIe", "a100-pcie", 312e12), ("B200", "b200", 2250e12)):
        for at, kind in enumerate(GROUPED):
            took = modelled = 0.0
            for of, experts, m, k, n, *shares in rows:
                if of == gpu:
                    at_peak = 2 * m * k * n / peak
                    took += experts * at_peak / shares[at]
                    modelled += experts * packaged_tables(name).grouped[kind].seconds(at_peak)
            assert modelled == pytest.approx(took, rel=0.15), (name, kind)


def test_a_table_without_experts_has_its_products() -> None:
    table = read_tables("hardware mine.toml, kernels", GOOD)
    assert tuple(table.grouped.values()) == tuple(table.products.values())
    assert table.permuted == table.moved
    experts = {"source": "here", **{kind: [[1, 0.1]] for kind in GROUPED}, "permute": 0.3}
    table = read_tables("hardware mine.toml, kernels", GOOD | {"experts": experts})
    assert table.permuted == 0.3
    with pytest.raises(InputError, match=r"missing experts\.permute: all of source, grouped"):
        read_tables("mine.toml", GOOD | {"experts": {"source": "here", **{kind: [[1, 0.1]] for kind in GROUPED}}})


def test_a_table_may_have_products_in_8_bits() -> None:
    assert FORMS == IN_8_BITS
    assert not read_tables("mine.toml", GOOD).eight_bits
    kinds = {kind: [[1, 0.2]] for kind in PRODUCTS}
    table = read_tables("mine.toml", GOOD | {"eight_bits": {"source": "here", "fp8_rows": kinds}})
    assert table.eight_bits.keys() == {f"{kind}_fp8_rows" for kind in PRODUCTS}
    assert packaged_tables("b200").eight_bits.keys() == OF_LINEAR.keys()
    for eight_bits, said in (
        ({"source": "here", "fp4": kinds}, "unknown key eight_bits.fp4: did you mean 'fp8'?"),
        ({"source": "here", "fp8": {}}, "missing eight_bits.fp8.linear: all of linear, linear_dgrad"),
        ({"source": "here", "fp8": 3}, "eight_bits.fp8: expected a table"),
        ({"source": "", "fp8": kinds}, "eight_bits.source '': expected text"),
        ({"source": "here", "fp8": kinds | {"linear": [[1, 2]]}}, "eight_bits.fp8.linear: share 2: expected"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            read_tables("mine.toml", GOOD | {"eight_bits": eight_bits})


GOOD: dict[str, Any] = {
    "gpu": "mine",
    "products": {
        "source": "measured here",
        **{kind: [[1, 0.1], [100, 0.6]] for kind in ("linear", "linear_dgrad", "linear_wgrad")},
        "narrow": [[1024, 1.0]],
    },
    "attention": {
        "source": "measured here",
        "tiles_forward": [[1, 1.0]],
        "tiles_backward": [[1, 1.0]],
        "fa2": {"128": {"forward": [[512, 0.3]], "backward": [[512, 0.2]]}},
    },
    "memory": {"source": "measured here", "latency_us": 10, "share": 0.7, "cross_entropy": 0.5},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with another value at a dotted path; None takes the key out."""
    *parts, last = path.split(".")
    copy: dict[str, Any] = {key: _copied(of) for key, of in GOOD.items()}
    at = copy
    for part in parts:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copy


def _copied(value: Any) -> Any:
    return {key: _copied(of) for key, of in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("products.linear", None, "missing products.linear: all of source, linear,"),
        ("products.liner", [[1, 0.5]], "unknown key products.liner: did you mean 'linear'?"),
        ("products.linear", [], "products.linear: expected a list of [size, share]"),
        ("products.linear", [[1, 0.5], [2]], "products.linear: expected a list of [size, share]"),
        ("products.linear", [[1, -0.5]], "products.linear: share -0.5: expected a number more than 0, at most 1"),
        ("products.linear", [[1, 1.5]], "products.linear: share 1.5: expected"),
        ("products.linear", [[-1, 0.5]], "products.linear: size -1: expected a number more than 0"),
        ("products.linear", [[2, 0.5], [1, 0.6]], "products.linear: 1 after 2: sizes ascend"),
        ("products.linear", [[1, 0.1], [2, 0.9]], "takes less time, but more work never ends sooner"),
        ("attention.fa4", {}, "unknown key attention.fa4: did you mean 'fa3'?"),
        ("attention.fa2", {"wide": {}}, "attention.fa2.wide: expected a head width"),
        ("attention.fa2.128.backward", None, "missing attention.fa2.128.backward"),
        ("memory.cross_entropy", "fast", "memory.cross_entropy: share 'fast': expected a number"),
        ("memory.latency_us", -1, "memory.latency_us -1: expected microseconds, at least 0"),
        ("memory", 3, "memory: expected a table"),
        ("memory.source", "", "memory.source '': expected text, which says where the figures come from"),
        ("gpu", None, "missing gpu"),
    ],
)
def test_a_broken_table_is_refused_by_its_key(path: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_tables("hardware mine.toml, kernels", changed(path, value))
    assert said in str(error.value)
    assert str(error.value).startswith("hardware mine.toml, kernels: ")
    assert "\n" not in str(error.value)


def test_a_users_own_gpu_may_have_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    device = (
        'name = "mine"\nmemory_bytes = "80GB"\npeak_flops = 1e14\nhbm_bytes_per_s = "1TB"\nlink_bytes_per_s = "1TB"\n'
    )
    table = (TABLES / "h100.toml").read_text("utf-8")
    nested = "[kernels]\n" + table.replace("\n[", "\n[kernels.")
    path.write_text(device + nested, encoding="utf-8")
    assert read_hardware(str(path)).kernels == packaged_tables("h100")
