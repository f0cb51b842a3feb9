"""Fused ops, the building blocks of models: one class each with its backward rule.

A rule saves only the buffers that its backward reads: handles of operands (a `Parameter` is
never saved as an array, because its data comes and goes) and the few buffers named in its docstring.
"""

from zerosim.functional.activation import geglu as geglu
from zerosim.functional.activation import gelu as gelu
from zerosim.functional.activation import gelu_erf as gelu_erf
from zerosim.functional.activation import relu as relu
from zerosim.functional.activation import swiglu as swiglu
from zerosim.functional.attention import attention as attention
from zerosim.functional.beside import beside as beside
from zerosim.functional.beside import with_loss as with_loss
from zerosim.functional.by_rows import by_rows as by_rows
from zerosim.functional.cast import cast as cast
from zerosim.functional.cast import cast_weight as cast_weight
from zerosim.functional.cast import keeping as keeping
from zerosim.functional.cast import promoted_sum as promoted_sum
from zerosim.functional.clamped import clamped_swiglu as clamped_swiglu
from zerosim.functional.dropout import dropout as dropout
from zerosim.functional.embedding import add_row as add_row
from zerosim.functional.embedding import add_row_runs as add_row_runs
from zerosim.functional.embedding import add_rows as add_rows
from zerosim.functional.embedding import embedding as embedding
from zerosim.functional.experts import combine as combine
from zerosim.functional.experts import dispatch as dispatch
from zerosim.functional.experts import grouped_linear as grouped_linear
from zerosim.functional.experts import row_weights as row_weights
from zerosim.functional.experts import weigh as weigh
from zerosim.functional.head_layer_norm import head_layer_norm as head_layer_norm
from zerosim.functional.head_norm import head_norm as head_norm
from zerosim.functional.latent import columns as columns
from zerosim.functional.latent import latent_heads as latent_heads
from zerosim.functional.linear import linear as linear
from zerosim.functional.linear import packed_linear as packed_linear
from zerosim.functional.lora_stacks import add_adapter as add_adapter
from zerosim.functional.lora_stacks import stack_with_adapter as stack_with_adapter
from zerosim.functional.loss import cross_entropy as cross_entropy
from zerosim.functional.loss import cross_entropy_sum as cross_entropy_sum
from zerosim.functional.norm import layer_norm as layer_norm
from zerosim.functional.norm import rms_norm as rms_norm
from zerosim.functional.relative import relative_bias as relative_bias
from zerosim.functional.repeat import copied as copied
from zerosim.functional.repeat import repeat_kv as repeat_kv
from zerosim.functional.repeat import returned_kv as returned_kv
from zerosim.functional.rotary import rotary as rotary
from zerosim.functional.router import RouterLosses as RouterLosses
from zerosim.functional.router import Routing as Routing
from zerosim.functional.router import choose as choose
from zerosim.functional.router import route as route
from zerosim.functional.router import with_losses as with_losses
from zerosim.functional.scaled import scaled as scaled
from zerosim.functional.tempered import tempered as tempered
