"""Other frameworks' checkpoints: read without running anything of them, and written.

read_whole(path)                  a checkpoint of any known framework, as a `WholeState`
format_of(path)                   which framework's it is
write_safetensors, write_dcp, write_universal
"""

from zerosim.state.formats.find import format_of, read_whole
from zerosim.state.formats.to_dcp import write_dcp
from zerosim.state.formats.to_safetensors import write_safetensors
from zerosim.state.formats.to_universal import write_universal
from zerosim.state.formats.whole import Tensor, WholeState

__all__ = ["Tensor", "WholeState", "format_of", "read_whole", "write_dcp", "write_safetensors", "write_universal"]
