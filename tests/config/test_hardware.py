"""Devices by name and from a user's file: the figures that lessons rely on, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerosim.config.parts.fp8 import Fp8Config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import NEEDED, Hardware, check_formats, find_hardware, presets
from zerosim.config.presets.kernel_tables import KernelTables
from zerosim.config.presets.nodes import find_node, nodes
from zerosim.errors import InputError
from zerosim.placement.mesh import Mesh

NAMES = tuple(device.name for device in presets())
OWN = """
name = "my-card"
memory_bytes = "24GB"
peak_flops = 165e12
hbm_bytes_per_s = 1008000000000
link_bytes_per_s = "32GB"
"""


@pytest.mark.parametrize(
    ("name", "memory", "peak", "hbm", "link"),
    [
        ("v100-32", 32_000_000_000, 125, 900, 150),
        ("dgx1-v100", 32_000_000_000, 125, 900, 150),
        ("a100-40", 42_316_165_283, 312, 1555, 300),
        ("a100-80", 84_986_665_369, 312, 2039, 300),
        ("a100-pcie", 84_986_665_369, 312, 1935, 32),
        ("h100-80", 84_943_715_696, 989, 3350, 450),
        ("h100-96", 102_005_473_280, 989, 2400, 450),
        ("h200-141", 150_141_319_249, 989, 4800, 450),
        ("b200", 191_501_854_310, 2250, 7700, 900),
        ("gb200", 197_901_355_581, 2500, 8000, 900),
        ("v100-16", 16_943_645_982, 125, 900, 150),
        ("t4", 15_633_680_957, 65, 320, 16),
        ("l4", 23_654_532_382, 121, 300, 32),
        ("a10g", 23_686_744_637, 70, 600, 32),
        ("l40s", 47_695_611_822, 362, 864, 32),
        ("a6000", 51_045_686_312, 154.8, 768, 32),
        ("rtx3090", 25_447_681_228, 71, 936, 32),
        ("rtx4090", 25_383_256_719, 165.2, 1008, 32),
        ("rtx5090", 33_672_543_600, 209.5, 1792, 64),
        ("mi300x", 206_136_955_371, 1307.4, 5300, 448),
        ("a800-80", 84_986_665_369, 312, 2039, 200),
        ("h800-80", 84_943_715_696, 989, 3350, 200),
        ("h20", 102_005_473_280, 148, 4000, 450),
        ("a40", 47_620_449_894, 149.7, 696, 32),
        ("gh200", 101_876_624_261, 989, 4000, 450),
    ],
)
def test_published_figures(name: str, memory: int, peak: float, hbm: int, link: int) -> None:
    """Bytes that a driver reports (of the V100 the paper's), dense 16-bit TFLOPs, GB/s, GB/s per direction."""
    device = find_hardware(name)
    assert (device.memory_bytes, device.hbm_bytes_per_s, device.link_bytes_per_s) == (memory, hbm * 10**9, link * 10**9)
    assert device.peak_flops == round(peak * 10**4) * 10**8


def test_formats_and_whose_kernels() -> None:
    """Tensor cores know bf16 from Ampere on. A GPU without tables of its own takes a neighbour's, and says so."""
    assert [device.name for device in presets() if "bf16" not in device.formats] == [
        "v100-32",
        "dgx1-v100",
        "v100-16",
        "t4",
    ]
    assert all("fp16" in device.formats for device in presets())
    neighbours = {"gb200": "B200", "v100-16": "V100", "t4": "V100", "rtx4090": "A100 PCIe 80GB", "mi300x": "H100 SXM"}
    for name, of in neighbours.items():
        cluster = cluster_of(find_hardware(name))
        assert isinstance(cluster.measured, KernelTables)
        assert cluster.measured.gpu == of
        assert cluster.source.startswith("assumed, of ") == (name != "v100-16")


def test_which_multiply_in_8_bits() -> None:
    """From Hopper and Ada on, at twice the rate of 16; with MXFP8's scales Blackwell of data centers."""
    without = ["v100-32", "dgx1-v100", "a100-40", "a100-80", "a100-pcie", "v100-16", "t4", "a10g", "a6000", "rtx3090"]
    assert [device.name for device in presets() if not device.fp8_flops] == [*without, "a800-80", "a40"]
    assert [device.name for device in presets() if device.has_mxfp8] == ["b200", "gb200"]
    for device in presets():
        assert not device.fp8_flops or device.fp8_flops == pytest.approx(2 * device.peak_flops, rel=0.015)
        assert not device.has_mxfp8 or device.all_formats[-2:] == ("fp8", "mxfp8")
        assert bool(device.fp8_flops) == ("FP8" in device.sources.peak)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a100-80", "tensorwise", "'tensorwise': a100-80 has no units that multiply in 8 bits; choose h100-80 or"),
        ("h100", "mxfp8", "'mxfp8': h100-80 has no scales for 32 numbers; choose tensorwise, rowwise or blockwise, or"),
    ],
)
def test_a_device_without_the_units_is_refused(name: str, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=f"fp8 {message}"):
        check_formats(find_hardware(name), Fp8Config(kind=kind))
    check_formats(find_hardware("b200"), Fp8Config(kind=kind))
    check_formats(find_hardware(name), Fp8Config())


def test_a_file_says_whether_it_multiplies_in_8_bits(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"my-card has no units .* or give fp8_flops in its TOML file"):
        check_formats(find_hardware(own(tmp_path, OWN)), Fp8Config(kind="tensorwise"))
    device = find_hardware(own(tmp_path, OWN + "fp8_flops = 330e12\nmxfp8 = true\n"))
    assert (device.fp8_flops, device.has_mxfp8) == (330 * 10**12, True)
    assert cluster_of(device).fp8_flops == 330e12
    check_formats(device, Fp8Config(kind="mxfp8"))


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "nic", "host"),
    [
        ("dgx-1", "dgx1-v100", 8, 48, 512), ("dgx-2", "v100-32", 16, 96, 1500), ("dgx-a100", "a100-40", 8, 192, 1000),
        ("dgx-h100", "h100-80", 8, 384, 2000), ("gb200-nvl72", "gb200", 72, 3456, None),
        ("p3.16xlarge", "v100-16", 8, 3, 524), ("g5.48xlarge", "a10g", 8, 12, 825),
        ("4xrtx4090", "rtx4090", 4, 1.2, None),
    ],
)  # fmt: skip
def test_nodes(name: str, gpu: str, gpus: int, nic: float, host: int | None) -> None:
    node = find_node(name.upper())
    cluster = cluster_of(find_hardware(node.gpu), node=node)
    assert (node.gpu, cluster.node_gpus, cluster.nic, cluster.pair) == (gpu, gpus, nic * 10**9, 0)
    assert node.host_bytes == (None if host is None else host * 10**9)
    assert (cluster_of(find_hardware(gpu), node=node, node_gpus=2, nic_bytes_per_s=7).node_gpus) == 2


def test_every_node_has_a_source_and_known_gpus() -> None:
    assert len(nodes()) == len({node.name for node in nodes()})
    for node in nodes():
        assert node.source
        assert node.gpu in NAMES
        assert bool(cluster_of(find_hardware(node.gpu), node=node).pair) == node.bridged


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("dgx-h10", "unknown --node 'dgx-h10': did you mean dgx-h100?"),
        ("abacus", "unknown --node 'abacus': known: dgx-1, "),
    ],
)
def test_unknown_nodes(written: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_node(written)
    assert str(caught.value).startswith(message)


def test_every_figure_has_a_source() -> None:
    assert len(presets()) == len(set(NAMES)) == 25
    for device in presets():
        given = device.sources
        assert all((given.memory, given.peak, given.hbm, given.link))
        assert given.hbm in device.source
    v100 = find_hardware("v100-32").sources
    assert v100.memory.startswith("paper")
    assert v100.peak.startswith("recalled")
    assert v100.hbm.startswith("recalled")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100-80"), ("nvidia H100-80", "h100-80"), ("A100-SXM4-80GB", "a100-80"), ("a100 40 GB", "a100-40"),
        ("Tesla_V100", "v100-32"), ("NVIDIA H200", "h200-141"), ("B200-SXM-180GB", "b200"), (" b200 ", "b200"),
        ("h100-80GiB", "h100-80"), ("A100 80GB PCIe", "a100-pcie"), ("a100-pcie", "a100-pcie"), ("h100-96", "h100-96"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("RTX-3090", "rtx3090"), ("NVIDIA RTX A6000", "a6000"),
        ("Tesla T4", "t4"), ("AMD Instinct MI300X", "mi300x"), ("v100", "v100-32"), ("Tesla V100-SXM2-16GB", "v100-16"),
        ("a800", "a800-80"), ("NVIDIA A800-SXM4-80GB", "a800-80"), ("H800", "h800-80"), ("NVIDIA H20", "h20"),
        ("NVIDIA A40", "a40"), ("GH200", "gh200"), ("NVIDIA GH200 480GB", "gh200"),
    ],
)  # fmt: skip
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert find_hardware(written).name == name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("a100", "hardware 'a100' matches a100-40 and a100-80; choose one"),
        ("h100-90", "unknown hardware 'h100-90': did you mean h100-96?"),
        ("a100-pcie-40", "unknown hardware 'a100-pcie-40': did you mean a100-pcie?"),
        ("abacus", f"unknown hardware 'abacus': known: {', '.join(NAMES)}, or a TOML file"),
    ],
)  # fmt: skip
def test_unknown_names(written: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_hardware(written)
    assert str(caught.value) == message


def own(folder: Path, text: str) -> str:
    path = folder / "card.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    device = find_hardware(own(tmp_path, OWN))
    assert isinstance(device, Hardware)
    assert (device.name, device.memory_bytes, device.peak_flops) == ("my-card", 24 * 10**9, 165 * 10**12)
    assert (device.hbm_bytes_per_s, device.link_bytes_per_s) == (1008 * 10**9, 32 * 10**9)
    assert "card.toml" in device.source


def test_a_file_says_links_shares_and_attention(tmp_path: Path) -> None:
    more = """
pair_bytes_per_s = "50GB"
pcie_bytes_per_s = "48GB"
nic_bytes_per_s = "100GB"
nic_share = 0.5
node_gpus = 4
formats = ["fp16"]
flash_kernel = "fa1"
kernels = "h100"
"""
    device = find_hardware(own(tmp_path, OWN + more))
    cluster = cluster_of(device)
    assert (device.formats, device.flash, device.flash_kernel) == (("fp16",), True, "fa1")
    assert (cluster.link, cluster.pair, cluster.pcie, cluster.nic, cluster.node_gpus) == (32e9, 50e9, 48e9, 50e9, 4)
    assert cluster.flash_kernel == "fa1"
    assert cluster.source.startswith("H100 SXM: ")
    without = find_hardware(own(tmp_path, OWN + 'flash_kernel = "none"\n'))
    assert (without.flash, without.flash_kernel) == (False, "")
    assert cluster_of(without).source.startswith("assumed, of A100 SXM: ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("nic_share = 1.5", "nic_share 1.5: expected a number more than 0, at most 1"),
        ("node_gpus = 0", "node_gpus 0: expected a whole number, at least 1"),
        ('formats = "fp16"', "formats 'fp16': expected a list of fp16 and bf16"),
        ('formats = ["fp8"]', "formats 'fp8': expected one of bf16, fp16"),
        ("fp8_flops = -1", "fp8_flops -1: expected a whole number from 1 to 1e18, like 312e12"),
        ('mxfp8 = "yes"', "mxfp8 'yes': expected true or false"),
        ("mxfp8 = true", "mxfp8 = true needs the peak of its 8-bit units; give fp8_flops too"),
        ('flash_kernel = "fa4"', "flash_kernel 'fa4': did you mean 'fa3'?"),
        ('kernels = "h10"', "kernels 'h10': did you mean 'h100'?"),
        ("pcie_bytes_per_s = -1", "pcie_bytes_per_s -1: expected a whole number"),
    ],
)
def test_links_shares_and_attention_are_checked(tmp_path: Path, more: str, message: str) -> None:
    path = own(tmp_path, f"{OWN}{more}\n")
    with pytest.raises(InputError) as caught:
        find_hardware(path)
    assert str(caught.value).startswith(f"hardware {path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", NEEDED)
def test_every_key_is_needed(tmp_path: Path, key: str) -> None:
    lines = [line for line in OWN.splitlines() if not line.startswith(key)]
    with pytest.raises(InputError, match=f"missing {key}: all of name, "):
        find_hardware(own(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_bytes =", "memory_byte ="), "unknown key 'memory_byte': did you mean 'memory_bytes'?"),
        (('"24GB"', '"24 apples"'), "memory_bytes '24 apples' is not a size in bytes"),
        (('"24GB"', "-1"), "memory_bytes -1: expected a whole number from 1 to 1e18, like \"80GB\""),
        (('"24GB"', "true"), "memory_bytes True: expected a whole number"),
        (("165e12", "inf"), "peak_flops inf: expected a whole number from 1 to 1e18, like 312e12"),
        (("165e12", '"165e12"'), "peak_flops '165e12': expected a whole number"),
        (("165e12", "0"), "peak_flops 0: expected"),
        (('"my-card"', "7"), "name 7: expected text"),
        (("name =", "name"), "is not valid TOML: "),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = own(tmp_path, OWN.replace(*change))
    with pytest.raises(InputError) as caught:
        find_hardware(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"hardware {path}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"cannot read hardware .*none\.toml: No such file or directory: give a TOML file with"
    ):
        find_hardware(str(tmp_path / "none.toml"))


def test_what_is_outside_of_a_program_depends_on_the_gpu_and_on_the_mesh() -> None:
    mib = 2**20
    a100, h100 = find_hardware("a100-80"), find_hardware("h100")
    alone, pair, eight = (
        {one.name: one.nbytes for one in a100.outside(mesh)} for mesh in (Mesh(), Mesh(tp=2), Mesh(tp=2, dp_shard=8))
    )
    assert alone == {
        "CUDA context": 414 * mib, "cuBLAS workspaces": 2 * 8_519_680, "cuBLASLt workspace": 4 * mib
    }  # fmt: skip
    assert pair == {**alone, "NCCL buffers": 544 * mib}
    assert eight == {**alone, "NCCL buffers": (544 + 688) * mib}
    assert {one.name: one.nbytes // mib for one in h100.outside(Mesh(tp=2))} == {
        "CUDA context": 414, "NCCL buffers": 544, "cuBLAS workspaces": 64, "cuBLASLt workspace": 32
    }  # fmt: skip
    tied, two = a100.outside(Mesh(pp=4, tp=2), is_tied=True), a100.outside(Mesh(pp=2, tp=2), is_tied=True)
    assert tied[1].nbytes == (688 + 544 + 544) * mib  # two stages talk in the pipeline's own group
    assert tied[1].assumed.startswith(
        "688 MiB pp (4) + 544 MiB tp (2) + 544 MiB first and last stage (2); groups add up"
    )
    assert two[1].nbytes == 2 * 544 * mib
    assert "NCCL buffers" not in {one.name for one in find_hardware("v100-32").outside(Mesh(tp=2))}  # no source
    assert all(one.source for device in presets() for one in device.outside(Mesh(tp=2)))
    assert [device.name for device in presets() if not device.flash] == ["v100-32", "dgx1-v100", "v100-16", "t4"]


def test_links_of_gpus_that_are_sold_with_fewer_and_of_one_beside_its_cpu() -> None:
    """An A800 has 8 of an A100's 12 NVLinks, an H800 8 of an H100's 18. Collectives inside a node scale with the links.
    A GH200 has its own CPU, six times as near as a PCIe 5 host's, and no other GPU in its node."""
    for few, many, share in (("a800-80", "a100-80", 8 / 12), ("h800-80", "h100-80", 8 / 18)):
        cluster, whole = cluster_of(find_hardware(few)), cluster_of(find_hardware(many))
        assert cluster.link == pytest.approx(whole.link * share, rel=1e-12)
        assert f"in proportion to links of {cluster.link / 1e9:g} GB/s" in cluster.collectives_source
    gh200, h100 = cluster_of(find_hardware("gh200")), cluster_of(find_hardware("h100"))
    assert gh200.pcie > 6 * h100.pcie
    assert gh200.node_gpus == 1
