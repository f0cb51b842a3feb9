"""What a kernel and its launch cost on a GPU: cases worked by hand from a table, and what must hold of any table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware, presets
from zerosim.config.presets.kernel_tables import Curve, Flash, KernelTables, Reached, packaged_tables
from zerosim.config.presets.operators import operators
from zerosim.device.events import Copy, Kernel, Scope
from zerosim.device.work import DGRAD, GROUPED, GROUPED_DGRAD, GROUPED_WGRAD, IN_8_BITS, LINEAR, OF_LINEAR, WGRAD
from zerosim.errors import InputError
from zerosim.ledger.gpu_costs import COMPILED, LAUNCH, WRAPPED, GpuCosts
from zerosim.report.verdict import assumed

HALF, FULL = Reached(((1.0, 0.5),)), Curve(((1.0, 1.0),))
TABLES = KernelTables(
    "a GPU",
    {LINEAR: HALF, DGRAD: Reached(((1.0, 0.25),)), WGRAD: HALF},
    Curve(((4.0, 0.5), (16.0, 1.0))),
    {"fa2": {64: Flash(Curve(((8.0, 0.25),)), Curve(((8.0, 0.125),)))}},
    Flash(Curve(((2.0, 0.5), (4.0, 1.0))), FULL),
    1.0,
    0.8,
    0.4,
    {},
    {GROUPED: Reached(((1.0, 0.1), (4.0, 0.25))), GROUPED_DGRAD: HALF, GROUPED_WGRAD: HALF},
    0.2,
)
SLOW = replace(cluster_of(find_hardware("a100-80")), peak_flops=100.0, hbm=10.0)


def of(name: str, flops: int, nbytes: int = 0, shape: tuple[int, ...] = ()) -> Kernel:
    return Kernel(Scope(0), name, "matmul" if flops else "vector", flops, nbytes // 2, nbytes // 2, shape)


def seconds(kernel: Kernel, kernels: str = "fused") -> float:
    return GpuCosts(TABLES, SLOW, RunConfig(kernels=kernels)).kernel(kernel)


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [
        (of(LINEAR, 1000, 8), 10 / 0.5),  # 10 s at the peak
        (of(LINEAR, 1000, 8, (99, 16, 99)), 10 / 0.5),
        (of(LINEAR, 1000, 8, (99, 4, 99)), 10 / 0.5 / 0.5),  # a narrow one
        (of(DGRAD, 1000, 8), 10 / 0.25),
        (of(LINEAR, 1000, 400), 1 + 40 / 0.8),  # a latency and 40 s of memory traffic
        (of("add", 0, 80), 1 + 8 / 0.8),
        (of("cross_entropy", 0, 80), 1 + 8 / 0.4),
        (of("flash_attention", 1000, 8, (4, 1, 1, 8, 64)), 5 / 0.25),  # half of the products, on 4 tiles
        (of("flash_attention", 1000, 8, (2, 1, 1, 8, 64)), 5 / 0.25 / 0.5),  # too few tiles
        (of("flash_attention_backward", 1000, 8, (2, 1, 1, 8, 64)), 5 / 0.125),
        (of("flash_attention", 1000, 8, (4, 1, 1, 8, 64, 15)), 153.6 / 0.25),  # 15 scores a head, whatever flops count
        (of(GROUPED, 800, 8, (96, 16, 99, 2)), 8 / 0.25),  # two experts' products of 4 s at the peak each
        (of(GROUPED, 800, 8, (96, 16, 99, 8)), 8 / 0.1),  # as much work for eight of 1 s each
        (of(GROUPED, 800, 8, (96, 16, 99, 80)), 80 * 1 / 0.1),  # a product takes as long as the smallest measured one
        (of(GROUPED_WGRAD, 800, 8, (99, 4, 99, 2)), 8 / 0.5),  # of a weight gradient the rows are inner
        (of(GROUPED_DGRAD, 800, 8, (99, 4, 99, 2)), 8 / 0.5 / 0.5),  # a narrow weight
        (of("take_rows", 0, 80), 1 + 8 / 0.2),
        (of("sum_rows", 0, 80), 1 + 8 / 0.2),
        (of("free", 0, 0), 0.0),
    ],
)
def test_a_kernel_takes_the_longer_of_arithmetic_and_memory(kernel: Kernel, takes: float) -> None:
    assert seconds(kernel) == pytest.approx(takes)


def test_a_product_in_8_bits_has_the_share_and_the_peak_of_8_bits() -> None:
    """A form without a curve takes the product's in 16 bits. torchao's gradients by rows are followed by a kernel."""
    tables = replace(TABLES, eight_bits={"linear_fp8": Reached(((1.0, 0.8),))})
    config = RunConfig(model="llama", layers=2, fp8="tensorwise")
    costs = GpuCosts(tables, replace(SLOW, fp8_flops=400.0), config)
    assert costs.kernel(of("linear_fp8", 1600, 8)) == pytest.approx(4 / 0.8)
    assert costs.kernel(of("linear_fp8", 1600, 8, (99, 4, 99))) == pytest.approx(4 / 0.8 / 0.5)
    assert costs.kernel(of("linear_dgrad_fp8", 1600, 8)) == pytest.approx(4 / 0.25)
    rows = of("linear_dgrad_fp8_rows", 1600, 80)
    assert costs.kernel(rows) == pytest.approx(4 / 0.25 + 1 + 8 / 0.8)
    assert costs.launch(rows) == costs.launch(of("linear", 1600, 80)) == WRAPPED
    with pytest.raises(InputError, match="fp8 'tensorwise': a100-80 has no units that multiply in 8 bits"):
        GpuCosts(TABLES, SLOW, config)


@pytest.mark.parametrize(("gpu", "forms"), [("h100-80", IN_8_BITS[:3]), ("b200", IN_8_BITS)])
def test_large_products_in_8_bits_gain_and_small_ones_hardly(gpu: str, forms: tuple[str, ...]) -> None:
    """4,096 rows of a 4,096 by 4,096 map: 1.2 to 2 times as fast as in bf16. 256 rows of 256 by 256: hardly."""
    cluster = cluster_of(find_hardware(gpu))
    assert isinstance(cluster.measured, KernelTables)
    costs = GpuCosts(cluster.measured, cluster, RunConfig(kernels="compiled"))

    def gain(kind: str, form: str, side: int) -> float:
        shape = side, side, side
        kernels = (of(name, 2 * side**3, 8, shape) for name in (kind, f"{kind}_{form}"))
        plain, eight = (costs.kernel(kernel._replace(bytes_written=0)) for kernel in kernels)
        return plain / eight

    for form in forms:
        for kind in (LINEAR, DGRAD, WGRAD):
            assert 1.2 < gain(kind, form, 4096) < 2
            assert gain(kind, form, 8192) > 1.2
            assert gain(kind, form, 256) < 1.15


def test_what_a_framework_runs_as_several_kernels_moves_more_bytes_in_as_many_launches() -> None:
    norm, eager = of("rms_norm", 0, 8000), operators("eager")["rms_norm"]
    assert eager.launches > 1
    assert seconds(norm, "eager") == pytest.approx(eager.launches * 1 + eager.traffic * 800 / 0.8)
    costs = {kernels: GpuCosts(TABLES, SLOW, RunConfig(kernels=kernels)) for kernels in ("eager", "compiled", "fused")}
    assert costs["eager"].launch(norm) == pytest.approx(max(WRAPPED, eager.launches * LAUNCH))
    assert costs["fused"].launch(norm) == pytest.approx(WRAPPED)
    assert costs["compiled"].launch(norm) == pytest.approx(COMPILED)
    free = GpuCosts(TABLES, replace(SLOW, host=0.0), RunConfig())
    assert free.launch(norm) == free.call(Copy(Scope(0), "device", "host", 8)) == 0


def test_a_device_may_say_which_flash_attention_it_runs() -> None:
    """In place of the recipe's; what is given wins."""
    runs = replace(SLOW, flash_kernel="fa1")
    tables = packaged_tables("a100")
    for recipe in ("paper", "fsdp2"):
        assert GpuCosts(tables, runs, RunConfig(recipe=recipe)).flash_kernel == "fa1"
    assert GpuCosts(tables, runs, RunConfig(flash_kernel="fa2")).flash_kernel == "fa2"
    assert GpuCosts(tables, SLOW, RunConfig()).flash_kernel == "fa2"


@pytest.mark.parametrize("device", presets(), ids=lambda device: device.name)
@pytest.mark.parametrize("kernels", ["eager", "compiled", "fused"])
def test_what_does_more_never_ends_sooner(device: object, kernels: str) -> None:
    cluster = cluster_of(device)  # type: ignore[arg-type]
    assert isinstance(cluster.measured, KernelTables)
    for asked in ("fa1", "fa2", "cudnn"):
        costs = GpuCosts(cluster.measured, cluster, RunConfig(kernels=kernels, flash_kernel=asked))
        eight_bits = OF_LINEAR if cluster.fp8_flops else ()
        for name in (LINEAR, DGRAD, WGRAD, *eight_bits):
            times = [costs.kernel(of(name, 2**n, 8, (2048, 2048, 2048))) for n in range(20, 50)]
            assert times == sorted(times)
        for name in (GROUPED, GROUPED_DGRAD, GROUPED_WGRAD):
            for experts in (1, 8, 128):
                times = [costs.kernel(of(name, 2**n, 8, (2048, 2048, 2048, experts))) for n in range(20, 50)]
                assert times == sorted(times)
        for name in ("add", "rms_norm", "cross_entropy"):
            times = [costs.kernel(of(name, 0, 2**n)) for n in range(8, 36)]
            assert times == sorted(times)
        for name in ("flash_attention", "flash_attention_backward"):
            for width in (32, 64, 80, 128, 256):
                shapes = [(1, 16, 16, 2**n, width) for n in range(7, 18)]
                times = [costs.kernel(of(name, 4 * 16 * s[3] ** 2 * width, 8, s)) for s in shapes]
                assert times == sorted(times)


@pytest.mark.parametrize(
    ("gpu", "asked", "taken", "table"),
    [
        ("a100-80", "cudnn", "fa2", "A100 SXM"),
        ("h100-80", "cudnn", "cudnn", ""),
        ("h200-141", "xformers", "fa2", "H100 SXM"),
        ("b200", "fa2", "cudnn", "B200"),
    ],
)
def test_a_flash_kernel_that_a_table_lacks_is_another_one_and_a_plan_says_so(
    gpu: str, asked: str, taken: str, table: str
) -> None:
    cluster: Cluster = cluster_of(find_hardware(gpu))
    assert isinstance(cluster.measured, KernelTables)
    config = RunConfig(flash_kernel=asked, attention="flash")
    assert GpuCosts(cluster.measured, cluster, config).flash_kernel == taken
    said = f"the table of {table} has no {asked}: timed as {taken}"
    assert (said in assumed(config, None, cluster)) == bool(table)
    assert "has no" not in assumed(config, None, None) + assumed(config.replace(attention="eager"), None, cluster)
