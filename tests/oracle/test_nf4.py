"""NF4 against bitsandbytes on a CPU: the same codes, scales and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zerosim.backends.numpy.nf4 import NF4, decode_nf4, encode_nf4
from zerosim.placement import formats

bnb = pytest.importorskip("bitsandbytes.functional")


def test_the_table_is_equal() -> None:
    np.testing.assert_array_equal(NF4, bnb.get_4bit_type("nf4", device="cpu").numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 63, 64, 100, 64 * 256, 64 * 256 + 1, 40_000, 300_001])
def test_codes_scales_and_values_are_bitsandbytes(numel: int, dtype: torch.dtype) -> None:
    """All `==`, with bitsandbytes' own mean of the absmax values. PyTorch adds them up in fp32, in an order of its
    own, so that ours differs from it in the last places."""
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 0.02).to(dtype)
    values[64:128] = 0
    codes, state = bnb.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    stored, places = encode_nf4(values.float().numpy(), float(state.offset)), formats.NF4.places(numel)
    ours = [stored[place] for place in places]
    np.testing.assert_array_equal(ours[0], codes.numpy().reshape(-1))
    np.testing.assert_array_equal(ours[1], state.absmax.numpy())
    np.testing.assert_array_equal(ours[3].view(np.float32), state.state2.absmax.numpy())
    theirs = bnb.dequantize_4bit(codes, state).float().numpy().reshape(-1)
    np.testing.assert_array_equal(torch.from_numpy(decode_nf4(stored, numel)).to(dtype).float().numpy(), theirs)
    mean = encode_nf4(values.float().numpy())[places[2]].view(np.float32)
    np.testing.assert_allclose(mean, float(state.offset), rtol=1e-6)
